"""What ran where and when: one interval a step, measured by the runner or predicted by the simulator."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from layernodes.plan.step import Step
from layernodes.slots import StreamType


@final
@dataclass(frozen=True, slots=True)
class Interval:
    """One step on its stream, in seconds from the start of the run."""

    step: Step
    stream: StreamType
    start: float
    end: float

    @property
    def duration(self) -> float:
        """Seconds that the step took."""
        return self.end - self.start


@final
@dataclass(frozen=True, slots=True)
class Timeline:
    """The intervals of all steps, in the order of their schedule."""

    intervals: tuple[Interval, ...]

    @property
    def makespan(self) -> float:
        """Seconds from the first start to the last end; 0 for an empty timeline."""
        if not self.intervals:
            return 0.0
        return max(i.end for i in self.intervals) - min(i.start for i in self.intervals)
