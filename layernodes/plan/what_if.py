"""What would make a run shorter: the same steps in another order, or with other costs, simulated.

Contract: every figure is a simulation with one cost model, the run itself included, so that the changes can be compared
with each other; for a measured run the costs are those that it shows. Changes that bring nothing are not listed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Final, final

from pydantic import BaseModel, ConfigDict

from layernodes.plan import schedules
from layernodes.plan.causes import ExposedBecause, name_some
from layernodes.plan.costs import CostModel
from layernodes.plan.optimize import optimize_pair_with_report, optimize_with_report
from layernodes.plan.rules import Rules
from layernodes.plan.schedule import PairSchedule, Schedule
from layernodes.plan.shape import ChunkShape
from layernodes.plan.simulate import simulate_steps
from layernodes.plan.units import in_seconds
from layernodes.plan.validate import find_violations
from layernodes.slots import Phase, StreamType

LEAST: Final = 1e-3
"""The share of the makespan that a change must save to be worth a line."""
_BEST: Final = "the optimizer's order"
_DEFERRED: Final = "weight gradients deferred, in the optimizer's order"

_Change = tuple[str, float]


@final
class WhatIf(BaseModel):
    """One change.

    Attributes:
        change: what is changed, in words.
        makespan: seconds that the run then takes. saves: how much less that is, as a share.
    """

    model_config = ConfigDict(frozen=True)

    change: str
    makespan: float
    saves: float

    def __str__(self) -> str:
        return f"{self.change}: {in_seconds(self.makespan)}, {100 * self.saves:.1f} % less"


def find_what_helps(
    schedule: Schedule | PairSchedule,
    rules: Rules,
    costs: CostModel,
    causes: Sequence[ExposedBecause] = (),
    *,
    max_states: int,
) -> tuple[WhatIf, ...]:
    """The changes that make a run shorter, the best first.

    Args:
        schedule, rules: its steps, and what they must come after. For part of a schedule no other order is tried.
        costs: what they cost.
        causes: of what is exposed; moves that were tried are among the changes.
        max_states: how much the optimizer may search.
    """
    now = simulate_steps(schedule, costs, rules).makespan
    changes = [*_cheaper(schedule, rules, costs), *_moves(causes, now)]
    if not find_violations(schedule.steps, rules):
        if isinstance(schedule, PairSchedule):
            changes += _other_pairs(rules, costs, max_states)
        else:
            changes += _other_orders(schedule, rules, costs, max_states)
    found = [
        WhatIf(change=change, makespan=makespan, saves=1 - makespan / now)
        for change, makespan in changes
        if makespan < now * (1 - LEAST)
    ]
    return tuple(sorted(found, key=lambda one: one.makespan))


def _cheaper(schedule: Schedule | PairSchedule, rules: Rules, costs: CostModel) -> Iterator[_Change]:
    """The same order at other costs."""
    streams = {step.slot: stream for step, stream in zip(rules.steps, rules.streams, strict=True)}
    faster = costs.model_copy(update={"streams": streams}).scale(communication=0.5)
    yield "a link twice as fast", simulate_steps(schedule, faster, rules).makespan
    for field, change in (
        ("compute_slowdown", "computation that communication does not slow down"),
        ("communication_slowdown", "communication that computation does not slow down"),
    ):
        if getattr(costs, field) > 1:
            undisturbed = costs.model_copy(update={field: 1.0})
            yield change, simulate_steps(schedule, undisturbed, rules).makespan


def _moves(causes: Sequence[ExposedBecause], now: float) -> Iterator[_Change]:
    for cause in causes:
        if cause.saved_seconds is not None:
            yield f"{name_some(cause.could_run)} before {cause.waiter}", now - cause.saved_seconds


def _other_pairs(rules: Rules, costs: CostModel, max_states: int) -> Iterator[_Change]:
    forward, backward = rules.shapes[Phase.F], rules.shapes[Phase.B]
    best = optimize_pair_with_report(forward, backward, costs, max_states=max_states).makespan
    yield _BEST, best
    deferring = _deferring(backward, costs)
    if deferring is not None:
        deferred = optimize_pair_with_report(forward, deferring, costs, max_states=max_states).makespan
        if deferred < best:
            yield _DEFERRED, deferred


def _other_orders(schedule: Schedule, rules: Rules, costs: CostModel, max_states: int) -> Iterator[_Change]:
    shape, trains = rules.shapes[Phase.F], rules.shapes[Phase.B] is not None
    if shape is None:
        return
    count = len(rules.microbatches[Phase.F])

    def best(shape: ChunkShape, count: int) -> float:
        found = optimize_with_report(shape, costs, num_microbatches=count, mode=rules.mode, max_states=max_states)
        return found.makespan

    for name, order in _well_known(shape, count, trains=trains).items():
        if order != schedule:
            yield f"the schedule {name}", simulate_steps(order, costs, rules).makespan
    undeferred = best(shape, count)
    yield _BEST, undeferred
    deferring = _deferring(shape, costs) if trains else None
    if deferring is not None:
        deferred = best(deferring, count)
        if deferred < undeferred:
            yield _DEFERRED, deferred
    if count == 1:
        yield "a second microbatch beside it, for each of the two", best(shape, 2) / 2


def _well_known(shape: ChunkShape, count: int, *, trains: bool) -> dict[str, Schedule]:
    if not trains:
        return {"forward_only, two at a time": schedules.forward_only(shape, count, group=2)}
    return {
        "combined_1f1b": schedules.combined_1f1b(shape, count),
        "forward_forward": schedules.forward_forward(shape, count),
    }


def _deferring(shape: ChunkShape | None, costs: CostModel) -> ChunkShape | None:
    """The shape with every weight gradient deferred whose cost is known; None where that changes nothing."""
    if shape is None:
        return None
    layers = tuple(
        replace(
            layer,
            slots=tuple(
                replace(slot, wgrad=slot.wgrad or _has_wgrad(costs, number, layer.kind, slot.name))
                if not slot.passthrough and slot.stream is StreamType.COMPUTE
                else slot
                for slot in layer.slots
            ),
        )
        for number, layer in enumerate(shape.layers)
    )
    deferring = replace(shape, layers=layers)
    return None if deferring == shape else deferring


def _has_wgrad(costs: CostModel, layer: int, kind: str, slot: str) -> bool:
    return costs.cost(layer=layer, kind=kind, slot=slot).W > 0
