"""Tries what the causes of exposed communication suggest: the computation that could have run, before what waits.

Contract: the move is the smallest that may run, and its figure is a simulation with the same costs as the run's own::

    moved  = the computation, and what it needs of what stands behind the waiter; with communication all that stands
             before it there, since its stream is a FIFO
    order  = the steps before the waiter, moved, the waiter, all others; each part in its old order
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from layernodes.plan.causes import ExposedBecause
from layernodes.plan.costs import CostModel
from layernodes.plan.exposure import ROUNDING
from layernodes.plan.rules import Rules
from layernodes.plan.schedule import PairSchedule, Schedule
from layernodes.plan.simulate import simulate_steps
from layernodes.plan.validate import find_violations
from layernodes.slots import StreamType


def try_moves(
    causes: Sequence[ExposedBecause], schedule: Schedule | PairSchedule, rules: Rules, costs: CostModel
) -> tuple[ExposedBecause, ...]:
    """The same causes, each with what it would save to move what could have run; linear in the steps, for each cause.

    Args:
        causes: of the run of the schedule. schedule, rules: its steps, and what they must come after.
        costs: what they cost.
    """
    now = simulate_steps(schedule, costs, rules).makespan

    def saved_by(cause: ExposedBecause) -> float | None:
        order = move_before(cause, schedule, rules)
        if order is None:
            return None
        saved = now - simulate_steps(order, costs, rules).makespan
        return saved if abs(saved) > ROUNDING * now else 0.0

    return tuple(cause.model_copy(update={"saved_seconds": saved_by(cause)}) for cause in causes)


def move_before(
    cause: ExposedBecause, schedule: Schedule | PairSchedule, rules: Rules
) -> Schedule | PairSchedule | None:
    """The schedule with the computation that could have run before the waiter; None where it cannot stand there."""
    if cause.waiter is None or not cause.could_run:
        return None
    steps = schedule.steps
    positions = {str(step): position for position, step in enumerate(steps)}
    at = positions[cause.waiter]
    dependencies = rules.dependencies(steps)
    moved: set[int] = {positions[step] for step in cause.could_run}
    takes_communication = False
    for p in range(max(moved), at, -1):
        is_comm = rules.streams[rules.ids[steps[p]]] is StreamType.COMM
        if p in moved or (takes_communication and is_comm):
            moved |= {p, *(before for before in dependencies[p] if before >= at)}
            takes_communication = takes_communication or is_comm
    if at in moved:
        return None

    def order() -> Iterator[int]:
        yield from range(at)
        yield from sorted(moved)
        yield from (p for p in range(at, len(steps)) if p not in moved)

    found = type(schedule)(steps[p] for p in order())
    return None if find_violations(found.steps, rules) else found
