"""Explains a timeline: which communication is exposed, why, and what would help."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, final

from pydantic import BaseModel, ConfigDict

from layernodes.plan.arguments import check_argument
from layernodes.plan.causes import CAUSE_WORDS, Cause, ExposedBecause, find_causes
from layernodes.plan.costs import CostModel
from layernodes.plan.measured import costs_of_timelines
from layernodes.plan.moves import try_moves
from layernodes.plan.retrace import rules_of, schedule_of, with_shape
from layernodes.plan.rules import Rules
from layernodes.plan.shape import ChunkShape, LayerShape
from layernodes.plan.simulate import simulate_steps
from layernodes.plan.timeline import Timeline
from layernodes.plan.units import in_seconds
from layernodes.plan.validate import check_part, find_violations
from layernodes.plan.what_if import LEAST, WhatIf, find_what_helps
from layernodes.slots import POST_PROCESS, PRE_PROCESS, Phase, StreamType

_MAX_STATES: Final = 20_000
_SHOWN: Final = 5


@final
class Explanation(BaseModel):
    """Why a run's communication is exposed, and what would help. Times in seconds.

    Attributes:
        makespan, compute_busy, comm_busy, exposed: figures of the timeline.
        causes: each exposed communication step, the longest first.
        by_cause: exposed seconds by cause, the most first.
        simulated: the makespan by the costs that the changes are simulated with; they are compared with this.
        helps: changes that would make it shorter, simulated, the best first.
    """

    model_config = ConfigDict(frozen=True)

    makespan: float
    compute_busy: float
    comm_busy: float
    exposed: float
    causes: tuple[ExposedBecause, ...]
    by_cause: dict[Cause, float]
    simulated: float
    helps: tuple[WhatIf, ...]

    def __str__(self) -> str:
        """The causes with their shares, the most exposed steps, and what would help."""
        share = f" ({100 * self.exposed / self.makespan:.1f} %)" if self.makespan > 0 else ""
        lines = [f"exposed communication: {in_seconds(self.exposed)} of {in_seconds(self.makespan)}{share}"]
        for cause, seconds in self.by_cause.items():
            lines.append(f"  {in_seconds(seconds):>9}  {CAUSE_WORDS[cause]}")
        if self.causes:
            lines += ["", "the most exposed steps:", *(f"  {one}" for one in self.causes[:_SHOWN])]
            if len(self.causes) > _SHOWN:
                lines.append(f"  and {len(self.causes) - _SHOWN} more")
        lines += [
            "",
            f"what would help, simulated{self._baseline()}:" if self.helps else self._no_help(),
            *(f"  {one}" for one in self.helps),
        ]
        if self.comm_busy > self.compute_busy:
            least = in_seconds(self.comm_busy - self.compute_busy)
            lines.append(
                f"communication takes longer than computation: in any order {least} of it stay exposed, "
                f"so send less, or faster"
            )
        return "\n".join(lines).rstrip()

    def _baseline(self) -> str:
        """Where a simulation of the run itself takes another time than the run did: that time."""
        if abs(self.simulated - self.makespan) <= LEAST * self.makespan:
            return ""
        return f" (this order, simulated, takes {in_seconds(self.simulated)})"

    def _no_help(self) -> str:
        least = f"{100 * LEAST:g} %"
        if self.exposed > 0:
            return f"no change that was tried makes the run {least} shorter, or more than that"
        return f"no communication is exposed, and no change that was tried makes the run {least} shorter"


def explain(
    timeline: Timeline,
    costs: CostModel | None = None,
    shape: ChunkShape | None = None,
    *,
    backward_shape: ChunkShape | None = None,
    max_states: int = _MAX_STATES,
) -> Explanation:
    """Explain why communication is exposed in a simulated or measured timeline, and simulate what would help.

    Args:
        timeline: of a whole schedule or pair.
        costs: what it was simulated with, or a profile of what ran; None: those that the timeline itself shows. These
            do not say what a weight gradient costs that was not deferred, nor how much of a time is slow-down.
        shape: shape of the chunk, of a pair's forward chunk. None: the one that the timeline was simulated or run with;
            of a trace that was read, what ``simulate`` reads off the steps.
        backward_shape: shape of a pair's backward chunk; None: ``shape``.
        max_states: how much the optimizer may search for a better order.

    Raises:
        ScheduleError: the steps are those of no schedule, or of none for this shape.
        CostError: a slot has no cost.
    """
    check_argument("timeline", timeline, Timeline)
    check_argument("costs", costs, CostModel, type(None))
    check_argument("max_states", max_states, int)
    timeline = with_shape(timeline, shape, backward_shape)
    schedule, rules = schedule_of(timeline), rules_of(timeline)
    check_part(schedule.steps, rules, but="cannot explain: ")
    causes = find_causes(timeline)
    by_cause = {cause: sum(one.seconds for one in causes if one.cause is cause) for cause in Cause}
    helps: tuple[WhatIf, ...] = ()
    simulated = timeline.makespan
    if timeline.makespan > 0:
        known = _shown_costs(timeline, rules) if costs is None else costs
        if not find_violations(schedule.steps, rules):  # of a part of a schedule other orders are not tried
            causes = (*try_moves(causes[:_SHOWN], schedule, rules, known), *causes[_SHOWN:])
        simulated = simulate_steps(schedule, known, rules).makespan
        helps = find_what_helps(schedule, rules, known, causes, max_states=max_states)
    return Explanation(
        makespan=timeline.makespan,
        compute_busy=timeline.busy(StreamType.COMPUTE),
        comm_busy=timeline.busy(StreamType.COMM),
        exposed=timeline.exposed_communication,
        causes=causes,
        by_cause=dict(sorted(((c, s) for c, s in by_cause.items() if s > 0), key=lambda pair: -pair[1])),
        simulated=simulated,
        helps=helps,
    )


def _shown_costs(timeline: Timeline, rules: Rules) -> CostModel:
    """The costs that a timeline shows; slots that it has no step of are free."""
    chunks = [shape for shape in (rules.shapes[Phase.F], rules.shapes[Phase.B]) if shape is not None]
    layers = tuple(
        _joined([chunk.layers[number] for chunk in chunks if number < chunk.num_layers])
        for number in range(max(chunk.num_layers for chunk in chunks))
    )
    ends = {end for chunk in chunks for end in chunk.ends}
    shape = ChunkShape(layers=layers, pre_process=PRE_PROCESS in ends, post_process=POST_PROCESS in ends)
    return costs_of_timelines([timeline], shape).model_copy(update={"hardware_queues": timeline.hardware_queues})


def _joined(layers: Sequence[LayerShape]) -> LayerShape:
    """A layer with the slots of all of these, which a pair's two chunks have under one number."""
    slots = {slot.name: slot for layer in layers for slot in layer.slots}
    return LayerShape(kind=layers[0].kind, slots=tuple(slots.values()))
