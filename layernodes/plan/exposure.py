"""Exposed communication: time that communication adds because no computation hides it.

Definition: a moment is exposed if the communication stream runs a step and the compute stream runs none. A step's
exposed time is the part of its interval that is exposed; the total is their sum, since at any moment at most one
communication step runs. What is shorter than rounding is no gap: a step may end where the next one starts, in sums that
round differently.

Why this is time that computation waits for: streams are FIFOs, so whatever ends a gap of the compute stream by its own
end stands at or behind, in the communication stream, every communication step that runs within the gap. After the last
step of the compute stream it is the end of the run that waits.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, final

from layernodes.plan.step import Step
from layernodes.slots import StreamType

if TYPE_CHECKING:
    from layernodes.plan.timeline import Interval

ROUNDING: Final = 1e-9
"""The share of a makespan below which a time is what rounding leaves."""


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Exposure:
    """A communication step that is exposed.

    Attributes:
        step: the communication step.
        position: its position in the schedule.
        seconds: for how long it runs while the compute stream runs nothing.
        begins: when its first exposed moment begins.
        waiter: the first computation after its last exposed moment; None: the end of the run.
    """

    step: Step
    position: int
    seconds: float
    begins: float
    waiter: Step | None


def find_exposures(intervals: Iterable[Interval]) -> tuple[Exposure, ...]:
    """The exposed communication steps, in order of start; linear if the intervals of each stream are in order."""
    intervals = tuple(intervals)
    least = ROUNDING * (max((i.end for i in intervals), default=0.0) - min((i.start for i in intervals), default=0.0))
    numbered = sorted(enumerate(intervals), key=lambda pair: pair[1].start)
    computing = [i for _, i in numbered if i.stream is StreamType.COMPUTE and i.end > i.start]
    found: list[Exposure] = []
    first = 0
    for position, comm in numbered:
        if comm.stream is not StreamType.COMM:
            continue
        while first < len(computing) and computing[first].end <= comm.start:
            first += 1
        seconds, at, index, begins = 0.0, comm.start, first, comm.end
        waiter: Step | None = None
        while at < comm.end:
            following = computing[index] if index < len(computing) else None
            gap_end = comm.end if following is None else min(comm.end, following.start)
            if gap_end - at > least:
                seconds += gap_end - at
                begins = min(begins, at)
                waiter = None if following is None else following.step
            if following is None:
                break
            at = max(at, following.end)
            index += 1
        if seconds > 0:
            found.append(Exposure(step=comm.step, position=position, seconds=seconds, begins=begins, waiter=waiter))
    return tuple(found)
