"""A timeline as text, for a terminal.

::

                0 s                       8 s
    compute     FFFFBBBB........WWWWFFFF......
    comm        ....ffffbbbbbbbb..............
    exposed             ^^^^^^^^

Each column is an equal share of the makespan. It shows the step that runs longest in it: the letter of the phase, in
small letters on the communication stream; a dot where the stream is idle for most of it; ``^`` where communication is
exposed for most of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from layernodes.errors import ScheduleError
from layernodes.plan.arguments import check_argument
from layernodes.plan.units import in_seconds
from layernodes.slots import StreamType

if TYPE_CHECKING:
    from layernodes.plan.timeline import Interval, Timeline

_LABEL = 10


def draw(timeline: Timeline, *, width: int) -> str:
    """Draw a timeline.

    Args:
        timeline: the timeline.
        width: characters of the time axis, at least 20.

    Raises:
        ScheduleError: a smaller width.
    """
    check_argument("width", width, int)
    if width < 20:
        raise ScheduleError(f"width={width}; give at least 20 characters")
    if timeline.makespan == 0:
        return "(a timeline of no length)"
    end = in_seconds(timeline.makespan)
    compute = _covered(timeline, StreamType.COMPUTE, width)
    comm = _covered(timeline, StreamType.COMM, width)
    lines = [
        f"{'':<{_LABEL}}0{end:>{width - 1}}",
        f"{'compute':<{_LABEL}}{_letters(compute, str.upper)}",
        f"{'comm':<{_LABEL}}{_letters(comm, str.lower)}",
    ]
    exposed = "".join("^" if c[0] > 0.5 and b[0] < 0.5 else " " for b, c in zip(compute, comm, strict=True)).rstrip()
    lines.append(f"{'exposed':<{_LABEL}}{exposed}".rstrip())
    share = 100 * timeline.exposed_communication / timeline.makespan
    lines.append(
        f"F forward, B backward, W weight gradients, small letters: communication; "
        f"exposed {in_seconds(timeline.exposed_communication)} ({share:.1f} %)"
    )
    return "\n".join(lines)


_Column = tuple[float, str]


def _letters(columns: Sequence[_Column], case: Callable[[str], str]) -> str:
    return "".join(case(letter) if share >= 0.5 else "." for share, letter in columns)


def _covered(timeline: Timeline, stream: StreamType, width: int) -> list[_Column]:
    """For each column, the share of it in which the stream is busy, and the letter of the phase that has most of it."""
    shares: list[dict[str, float]] = [{} for _ in range(width)]
    for interval in timeline.on(stream):
        for column, share in _columns(interval, timeline, width):
            letter = str(interval.step.phase)
            shares[column][letter] = shares[column].get(letter, 0.0) + share
    return [(sum(by.values()), max(by, key=lambda k: (by[k], k), default="")) for by in shares]


def _columns(interval: Interval, timeline: Timeline, width: int) -> list[_Share]:
    start = (interval.start - timeline.start) / timeline.makespan * width
    end = (interval.end - timeline.start) / timeline.makespan * width
    first, last = int(start), min(int(end), width - 1)
    return [(c, max(0.0, min(end, c + 1) - max(start, c))) for c in range(first, last + 1)]


_Share = tuple[int, float]
