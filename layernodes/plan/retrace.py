"""The schedule of a timeline, and what its steps waited for; of one that came without rules, read off the steps."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from layernodes.plan.infer import infer_rules, rules_of_shape
from layernodes.plan.rules import Mode, Rules
from layernodes.plan.schedule import PairSchedule, Schedule
from layernodes.plan.shape import ChunkShape
from layernodes.plan.validate import check_part
from layernodes.slots import Phase

if TYPE_CHECKING:
    from layernodes.plan.timeline import Timeline


def schedule_of(timeline: Timeline) -> Schedule | PairSchedule:
    """The steps of a timeline, in their order, as the schedule or pair that they are."""
    steps = [interval.step for interval in timeline.intervals]
    if timeline.rules is not None:
        return PairSchedule(steps) if timeline.rules.mode is Mode.PAIR else Schedule(steps)
    microbatches = {phase: {step.microbatch for step in steps if step.phase is phase} for phase in Phase}
    backward = microbatches[Phase.B] | microbatches[Phase.W]
    is_pair = microbatches[Phase.F] == {0} and backward == {1}
    return PairSchedule(steps) if is_pair else Schedule(steps)


def rules_of(timeline: Timeline) -> Rules:
    """The rules for the steps of a timeline: its own, or read off the steps, with the streams on which they ran.

    Raises:
        ScheduleError: numbers of layers or microbatches so high that most of them cannot have steps.
    """
    if timeline.rules is not None:
        return timeline.rules
    streams = {(i.step.layer, i.step.slot): i.stream for i in timeline.intervals}
    return infer_rules(schedule_of(timeline), lambda step: streams[step.layer, step.slot])


def with_shape(timeline: Timeline, shape: ChunkShape | None, backward_shape: ChunkShape | None = None) -> Timeline:
    """A timeline with the rules of this shape; the same where none is given.

    Args:
        timeline: of a schedule or pair.
        shape, backward_shape: as for ``simulate``.

    Raises:
        ScheduleError: the steps are not those of a schedule for this shape.
    """
    if shape is None and backward_shape is None:
        return timeline
    schedule = schedule_of(timeline)
    rules = rules_of_shape(schedule, shape, backward_shape)
    check_part(schedule.steps, rules)
    return replace(timeline, rules=rules)


def dependencies_of(timeline: Timeline) -> tuple[tuple[int, ...], ...]:
    """For each step of a timeline, the positions of those that had to be over before it.

    Raises:
        ScheduleError: the timeline came without dependencies, and its steps are those of no schedule.
    """
    if timeline.dependencies is not None:
        return timeline.dependencies
    steps, rules = schedule_of(timeline).steps, rules_of(timeline)
    check_part(steps, rules)
    return rules.dependencies(steps)
