"""The figures of a timeline, and of two side by side."""

from __future__ import annotations

from typing import TYPE_CHECKING, final

from pydantic import BaseModel, ConfigDict

from layernodes.plan.units import in_bytes, in_seconds
from layernodes.slots import StreamType

if TYPE_CHECKING:
    from layernodes.plan.timeline import Timeline


@final
class ExposedStep(BaseModel):
    """A communication step that is exposed: its text, how long, and the text of who waits (None: the run's end)."""

    model_config = ConfigDict(frozen=True)

    step: str
    seconds: float
    waiter: str | None


@final
class TimelineSummary(BaseModel):
    """The figures of one timeline; times in seconds.

    Attributes:
        num_steps: number of steps.
        makespan: from the first start to the last end.
        compute_busy, compute_idle, comm_busy, comm_idle: how long each stream runs steps and how long not.
        exposed_communication: how long communication runs without computation beside it.
        hidden_communication: the rest of ``comm_busy``.
        peak_activation_bytes: most bytes of activations held at once; 0 where nobody knows.
        peak_live_activations: most slots at once between their forward and the end of their backward.
        exposed_steps: the exposed communication steps, the longest first.
    """

    model_config = ConfigDict(frozen=True)

    num_steps: int
    makespan: float
    compute_busy: float
    compute_idle: float
    comm_busy: float
    comm_idle: float
    exposed_communication: float
    hidden_communication: float
    peak_activation_bytes: int
    peak_live_activations: int
    exposed_steps: tuple[ExposedStep, ...]

    def __str__(self) -> str:
        """A table of the figures, with the five most exposed steps."""
        lines = [f"{name:<22} {value}" for name, value in _rows(self)]
        for exposed in self.exposed_steps[:5]:
            waiter = exposed.waiter or "the end of the run"
            lines.append(f"  {exposed.step} exposes {in_seconds(exposed.seconds)}; {waiter} waits")
        if len(self.exposed_steps) > 5:
            lines.append(f"  and {len(self.exposed_steps) - 5} more")
        return "\n".join(lines)


@final
class Comparison(BaseModel):
    """Two timelines side by side.

    Attributes:
        names: what the two are called.
        first, second: their figures.
        speedup: makespan of the first over that of the second: above 1 where the second is faster. None where the
            second takes no time.
    """

    model_config = ConfigDict(frozen=True)

    names: tuple[str, str]
    first: TimelineSummary
    second: TimelineSummary
    speedup: float | None

    def __str__(self) -> str:
        """A table with one column each."""
        left = [value for _, value in _rows(self.first)]
        width = max(len(self.names[0]), *map(len, left))
        lines = [f"{'':<22} {self.names[0]:>{width}}  {self.names[1]}"]
        for (name, first), (_, second) in zip(_rows(self.first), _rows(self.second), strict=True):
            lines.append(f"{name:<22} {first:>{width}}  {second}")
        if self.speedup is not None:
            lines.append(f"{self.names[1]} is {self.speedup:.3f} times as fast as {self.names[0]}")
        return "\n".join(lines)


def summarize(timeline: Timeline) -> TimelineSummary:
    """The figures of a timeline."""
    exposed = timeline.exposed_communication
    comm_busy = timeline.busy(StreamType.COMM)
    return TimelineSummary(
        num_steps=len(timeline),
        makespan=timeline.makespan,
        compute_busy=timeline.busy(StreamType.COMPUTE),
        compute_idle=timeline.idle(StreamType.COMPUTE),
        comm_busy=comm_busy,
        comm_idle=timeline.idle(StreamType.COMM),
        exposed_communication=exposed,
        hidden_communication=comm_busy - exposed,
        peak_activation_bytes=timeline.peak_activation_bytes,
        peak_live_activations=timeline.peak_live_activations,
        exposed_steps=tuple(
            ExposedStep(step=str(e.step), seconds=e.seconds, waiter=None if e.waiter is None else str(e.waiter))
            for e in sorted(timeline.exposures, key=lambda e: (-e.seconds, e.position))
        ),
    )


def compare(first: Timeline, second: Timeline, names: tuple[str, str]) -> Comparison:
    """The figures of two timelines."""
    return Comparison(
        names=names,
        first=summarize(first),
        second=summarize(second),
        speedup=first.makespan / second.makespan if second.makespan > 0 else None,
    )


def _rows(s: TimelineSummary) -> list[tuple[str, str]]:
    def share(seconds: float) -> str:
        percent = f" ({100 * seconds / s.makespan:.1f} %)" if s.makespan > 0 else ""
        return in_seconds(seconds) + percent

    return [
        ("steps", str(s.num_steps)),
        ("makespan", in_seconds(s.makespan)),
        ("compute busy", share(s.compute_busy)),
        ("compute idle", share(s.compute_idle)),
        ("communication busy", share(s.comm_busy)),
        ("exposed communication", share(s.exposed_communication)),
        ("hidden communication", in_seconds(s.hidden_communication)),
        ("peak activations", in_bytes(s.peak_activation_bytes) if s.peak_activation_bytes else "unknown"),
        ("peak live slots", str(s.peak_live_activations)),
    ]
