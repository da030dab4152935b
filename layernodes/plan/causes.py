"""Why a communication step is exposed.

Contract, for an exposed step X, whose waiter and beginning are those of ``Exposure``::

    behind     X was ready before it started, since the step before it on its stream still ran: for how long
    could_run  computation that had not started when X's exposed time began, though all its predecessors were over:
               it stands behind the waiter in the schedule, and would have hidden X, or part of it

    cause      end         nothing is left to compute
               order       there is something that could run
               queue       there is not, but X itself started late, behind other communication
               dependency  neither: whatever is left to compute needs communication that is under way

Linear in the steps, and for each exposed step in the computation that stands behind its waiter, up to a limit.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from enum import StrEnum
from itertools import pairwise
from typing import TYPE_CHECKING, Final, final

from pydantic import BaseModel, ConfigDict

from layernodes.plan.exposure import ROUNDING
from layernodes.plan.retrace import dependencies_of
from layernodes.plan.units import in_seconds
from layernodes.slots import StreamType

if TYPE_CHECKING:
    from layernodes.plan.exposure import Exposure
    from layernodes.plan.timeline import Interval, Timeline

_LOOK_AHEAD: Final = 500


def name_some(steps: Sequence[str]) -> str:
    """The first two of some steps."""
    return ", ".join(steps[:2]) + (" and more" if len(steps) > 2 else "")


class Cause(StrEnum):
    """Why a communication step is exposed; see the module."""

    END = "end"
    ORDER = "order"
    QUEUE = "queue"
    DEPENDENCY = "dependency"


CAUSE_WORDS: Final = {
    Cause.END: "nothing is left to compute",
    Cause.ORDER: "computation could have run beside it, but stands later in the schedule",
    Cause.QUEUE: "it started late, behind other communication",
    Cause.DEPENDENCY: "whatever is left to compute needs communication that is under way",
}


@final
class ExposedBecause(BaseModel):
    """One exposed communication step, and why. Times in seconds.

    Attributes:
        step: its text. seconds: how long it is exposed.
        waiter: the computation that waits; None: the end of the run.
        cause: why.
        behind: the communication before it, if it waited for that. behind_seconds: for how long.
        could_run: computation that could have run meanwhile, in schedule order, until it would fill the exposed time.
        could_run_seconds: what that takes.
        saved_seconds: how much shorter the run is, simulated, with that before the waiter; None: not tried.
    """

    model_config = ConfigDict(frozen=True)

    step: str
    seconds: float
    waiter: str | None
    cause: Cause
    behind: str | None
    behind_seconds: float
    could_run: tuple[str, ...]
    could_run_seconds: float
    saved_seconds: float | None = None

    def __str__(self) -> str:
        waiter = self.waiter or "the end of the run"
        parts = [f"{self.step} is exposed for {in_seconds(self.seconds)}, and {waiter} waits"]
        if self.behind is not None:
            parts.append(
                f"{self.step} waits {in_seconds(self.behind_seconds)} for {self.behind} on the communication stream"
            )
        if self.cause is Cause.ORDER:
            parts.append(
                f"{name_some(self.could_run)} could have run beside it ({in_seconds(self.could_run_seconds)} of "
                f"computation) and {'stands' if len(self.could_run) == 1 else 'stand'} behind {waiter}{self._advice()}"
            )
        elif self.cause is not Cause.QUEUE:
            parts.append(CAUSE_WORDS[self.cause])
        return "; ".join(parts)

    def _advice(self) -> str:
        if self.saved_seconds is None:
            return ""
        if self.saved_seconds <= 0:
            return ", but before it, it would not make the run shorter"
        return f": put it before, which saves {in_seconds(self.saved_seconds)}"


def find_causes(timeline: Timeline) -> tuple[ExposedBecause, ...]:
    """Why each exposed communication step is, the longest first.

    Raises:
        ScheduleError: the timeline came without dependencies, and its steps are those of no schedule.
    """
    intervals = timeline.intervals
    ready = [max((intervals[p].end for p in before), default=timeline.start) for before in dependencies_of(timeline)]
    computing = [p for p, interval in enumerate(intervals) if interval.stream is StreamType.COMPUTE]
    starts = [intervals[p].start for p in computing]
    comm = [p for p, interval in enumerate(intervals) if interval.stream is StreamType.COMM]
    before = dict(pairwise(reversed(comm)))
    found = []
    for exposure in timeline.exposures:
        later = bisect_right(starts, exposure.begins)
        idle = [p for p in computing[later : later + _LOOK_AHEAD] if ready[p] <= exposure.begins]
        found.append(_because(exposure, intervals, ready[exposure.position], before.get(exposure.position), idle))
    return tuple(sorted(found, key=lambda one: -one.seconds))


def _because(
    exposure: Exposure, intervals: Sequence[Interval], ready: float, before: int | None, idle: Sequence[int]
) -> ExposedBecause:
    """
    Args:
        ready: when the step's predecessors were over.
        before: position of the step before it on its stream.
        idle: positions of computation that was ready when the exposed time began and did not run.
    """
    start = intervals[exposure.position].start
    behind_seconds = 0.0 if before is None else min(intervals[before].end, start) - ready
    if behind_seconds <= ROUNDING * start:
        before, behind_seconds = None, 0.0
    could_run: list[str] = []
    could_run_seconds = 0.0
    for p in idle:
        if could_run_seconds < exposure.seconds and intervals[p].step != exposure.waiter and intervals[p].duration > 0:
            could_run.append(str(intervals[p].step))
            could_run_seconds += intervals[p].duration
    if exposure.waiter is None:
        cause = Cause.END
    elif could_run:
        cause = Cause.ORDER
    else:
        cause = Cause.DEPENDENCY if before is None else Cause.QUEUE
    return ExposedBecause(
        step=str(exposure.step),
        seconds=exposure.seconds,
        waiter=None if exposure.waiter is None else str(exposure.waiter),
        cause=cause,
        behind=None if before is None else str(intervals[before].step),
        behind_seconds=behind_seconds,
        could_run=tuple(could_run),
        could_run_seconds=could_run_seconds,
    )
