"""What ran where and when: one interval a step, measured by the runner or predicted by the simulator."""

from __future__ import annotations

import importlib
from dataclasses import dataclass, field
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Self, final

from layernodes.errors import ArgumentError, MissingExtraError, ScheduleError
from layernodes.plan import critical_path, exposure, gantt, memory, perfetto, summary
from layernodes.plan.arguments import check_argument, check_items
from layernodes.plan.step import Step
from layernodes.slots import StreamType

if TYPE_CHECKING:
    from layernodes.plan.exposure import Exposure
    from layernodes.plan.rules import Rules
    from layernodes.plan.summary import Comparison, TimelineSummary


@final
@dataclass(frozen=True, slots=True)
class Interval:
    """One step on its stream, in seconds from the start of the run.

    Attributes:
        step: the step.
        stream: the stream on which it ran.
        start, end: seconds from the start of the run.
        acquires: bytes of activations that are held from this step's launch on.
        releases: bytes that are no longer held after it. Both are 0 where nobody knows, as in measured timelines.
    """

    step: Step
    stream: StreamType
    start: float
    end: float
    acquires: int = 0
    releases: int = 0

    @property
    def duration(self) -> float:
        """Seconds that the step took."""
        return self.end - self.start


@final
@dataclass(frozen=True)
class Timeline:
    """The intervals of all steps, in the order of their schedule.

    Attributes:
        intervals: one a step; those of one stream do not overlap and stand in the order in which they ran.
        dependencies: for each interval, the positions of those that had to be over before it; None: read off the
            steps when needed.
        hardware_queues: as in ``CostModel``.
        rules: those that the steps were simulated or run by; None: read off the steps when needed. No part of what
            makes two timelines equal.
    """

    intervals: tuple[Interval, ...]
    dependencies: tuple[tuple[int, ...], ...] | None = None
    hardware_queues: int = 2
    rules: Rules | None = field(default=None, kw_only=True, compare=False, repr=False)

    def __post_init__(self) -> None:
        check_items("intervals", self.intervals, Interval)
        object.__setattr__(self, "intervals", tuple(self.intervals))

    def __len__(self) -> int:
        return len(self.intervals)

    @cached_property
    def start(self) -> float:
        """When the first step starts; 0 for an empty timeline."""
        return min((i.start for i in self.intervals), default=0.0)

    @cached_property
    def end(self) -> float:
        """When the last step ends; 0 for an empty timeline."""
        return max((i.end for i in self.intervals), default=0.0)

    @property
    def makespan(self) -> float:
        """Seconds from the first start to the last end; 0 for an empty timeline."""
        return self.end - self.start

    def on(self, stream: StreamType) -> tuple[Interval, ...]:
        """The intervals of one stream."""
        return tuple(i for i in self.intervals if i.stream is stream)

    def busy(self, stream: StreamType) -> float:
        """Seconds for which a stream runs steps."""
        return sum(i.duration for i in self.on(stream))

    def idle(self, stream: StreamType) -> float:
        """Seconds of the makespan for which a stream runs nothing."""
        return self.makespan - self.busy(stream)

    @cached_property
    def exposures(self) -> tuple[Exposure, ...]:
        """The communication steps that are exposed, in order, with how long, and who waits. See ``exposure``."""
        return exposure.find_exposures(self.intervals)

    @property
    def exposed_communication(self) -> float:
        """Seconds for which a communication step runs and no computation does."""
        return sum(e.seconds for e in self.exposures)

    @property
    def critical_path(self) -> tuple[Interval, ...]:
        """The chain of steps that ends last, each held up by the one before it. See ``critical_path``."""
        return tuple(self.intervals[position] for position in critical_path.find_critical_path(self))

    @cached_property
    def peak_activation_bytes(self) -> int:
        """Most bytes of activations held at once, by launch order; 0 where nobody knows. See ``memory``."""
        return max(memory.live_bytes(self.intervals), default=0)

    @cached_property
    def peak_live_activations(self) -> int:
        """Most slots at once whose forward is launched and whose backward is not over, by launch order."""
        return max(memory.live_slots(self.intervals), default=0)

    def summary(self) -> TimelineSummary:
        """The figures of this timeline, as a pydantic model whose ``str`` is a short table."""
        return summary.summarize(self)

    def compare(self, other: Timeline, *, names: tuple[str, str] = ("this", "other")) -> Comparison:
        """This timeline's figures beside another's, as a pydantic model whose ``str`` is a short table.

        Args:
            other: for instance the measured one beside the predicted one.
            names: what to call the two.

        Raises:
            ArgumentError: no timeline, or not two names.
        """
        check_argument("other", other, Timeline)
        check_items("names", names, str, advice="give two, such as ('predicted', 'measured')")
        if len(names) != 2:
            raise ArgumentError(f"names has {len(names)} names, where two are wanted: this timeline's and the other's")
        return summary.compare(self, other, names)

    def gantt(self, width: int = 100) -> str:
        """Draw the timeline as text. See ``gantt``.

        Args:
            width: characters of the time axis.
        """
        return gantt.draw(self, width=width)

    def to_perfetto(self, path: str | PathLike[str]) -> None:
        """Write a trace to ``path`` that ui.perfetto.dev and chrome://tracing open (Chrome's JSON trace format).

        Raises:
            OSError: the file cannot be written.
        """
        check_argument("path", path, str, PathLike)
        Path(path).write_text(perfetto.dump(self), encoding="utf-8")

    @classmethod
    def from_perfetto(cls, path: str | PathLike[str]) -> Self:
        """Read the trace that ``to_perfetto`` wrote to ``path``; times count from the first start, bytes are not in it.

        Raises:
            ScheduleError: it is no such trace.
            OSError: the file cannot be read.
        """
        check_argument("path", path, str, PathLike)
        try:
            text = Path(path).read_text(encoding="utf-8-sig")
        except UnicodeDecodeError as error:
            raise ScheduleError(f"{path} cannot be read: byte {error.start} is no UTF-8") from None
        spans, hardware_queues = perfetto.parse(text, source=str(path))
        return cls(tuple(Interval(*span) for span in spans), hardware_queues=hardware_queues)

    def plot(self, path: str | PathLike[str], *, title: str | None = None) -> None:
        """Draw the timeline as a PNG, SVG or PDF picture, chosen by the name of the file. Needs ``layernodes[plot]``.

        Args:
            path: where the picture goes.
            title: a line above it; None: the makespan and the exposed communication alone.

        Raises:
            MissingExtraError: matplotlib is not installed.
            ScheduleError: the name of the file ends in no format that can be drawn.
            OSError: the file cannot be written.
        """
        check_argument("path", path, str, PathLike)
        try:
            module = importlib.import_module("layernodes.plan.plot")
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] != "matplotlib":
                raise
            raise MissingExtraError("plotting needs matplotlib: pip install 'layernodes[plot]'", extra="plot") from None
        module.plot(self, Path(path), title=title)
