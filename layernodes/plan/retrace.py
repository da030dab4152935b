"""The schedule of a timeline that came without one, and what its steps waited for: read off the steps."""

from __future__ import annotations

from typing import TYPE_CHECKING

from layernodes.plan.infer import infer_rules
from layernodes.plan.rules import Rules
from layernodes.plan.schedule import PairSchedule, Schedule
from layernodes.slots import Phase

if TYPE_CHECKING:
    from layernodes.plan.timeline import Timeline


def schedule_of(timeline: Timeline) -> Schedule | PairSchedule:
    """The steps of a timeline, in their order, as the schedule or pair that they are."""
    steps = [interval.step for interval in timeline.intervals]
    microbatches = {phase: {step.microbatch for step in steps if step.phase is phase} for phase in Phase}
    backward = microbatches[Phase.B] | microbatches[Phase.W]
    is_pair = microbatches[Phase.F] == {0} and backward == {1}
    return PairSchedule(steps) if is_pair else Schedule(steps)


def rules_of(timeline: Timeline) -> Rules:
    """The rules for the steps of a timeline, with the streams on which they ran.

    Raises:
        ScheduleError: the steps are those of no schedule.
    """
    streams = {(i.step.layer, i.step.slot): i.stream for i in timeline.intervals}
    return infer_rules(schedule_of(timeline), lambda step: streams[step.layer, step.slot])


def dependencies_of(timeline: Timeline) -> tuple[tuple[int, ...], ...]:
    """For each step of a timeline, the positions of those that had to be over before it.

    Raises:
        ScheduleError: the timeline came without dependencies, and its steps are those of no schedule.
    """
    if timeline.dependencies is not None:
        return timeline.dependencies
    return rules_of(timeline).dependencies(interval.step for interval in timeline.intervals)
