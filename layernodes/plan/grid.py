"""A schedule drawn as a grid: one row a step, one column a stream, an arrow at marked steps.

Contract: without marks every step has its row; with marks only the rows around them are drawn, so that the text of
an error stays short however long the schedule is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from layernodes.plan.arguments import check_argument
from layernodes.plan.shape import SLOT_STREAMS, ChunkShape
from layernodes.plan.step import Step
from layernodes.slots import Slot, StreamType

StreamOf = Callable[[Step], StreamType]

_BY_NAME = {str(slot): SLOT_STREAMS[slot] for slot in Slot}


def usual_stream(step: Step) -> StreamType:
    """The stream of Megatron-Core's slot of this name; COMPUTE for every other name."""
    return _BY_NAME.get(step.slot, StreamType.COMPUTE)


def stream_in(shape: ChunkShape | None) -> StreamOf:
    """Streams as a shape has them; the usual ones where there is no shape, or no such slot in it."""
    check_argument("shape", shape, ChunkShape, type(None))
    if shape is None:
        return usual_stream

    def stream_of(step: Step) -> StreamType:
        slot = shape.find(step)
        return usual_stream(step) if slot is None else slot.stream

    return stream_of


def render(
    steps: Sequence[Step],
    *,
    stream_of: StreamOf = usual_stream,
    marks: Mapping[int, str] | None = None,
    context: int = 3,
) -> str:
    """Draw steps as a grid.

    Args:
        steps: the steps in order.
        stream_of: the stream whose column a step stands in.
        marks: position of each step to mark, with a note to stand beside it (may be empty).
        context: rows drawn on each side of a mark; where there are no marks, all rows are drawn.
    """
    marks = marks or {}
    shown = sorted({p for mark in marks for p in range(mark - context, mark + context + 1) if 0 <= p < len(steps)})
    positions: Sequence[int] = shown if marks else range(len(steps))
    left = max([len("compute"), *(len(str(steps[p])) for p in positions if stream_of(steps[p]) is StreamType.COMPUTE)])
    right = max([len("comm"), *(len(str(steps[p])) for p in positions if stream_of(steps[p]) is StreamType.COMM)])
    digits = max(4, len(str(len(steps))))
    lines = [f"   {'step':>{digits}}  {'compute':<{left}}  comm"]
    previous = -1
    for p in positions:
        if p != previous + 1:
            lines.append(f"   {'...':>{digits}}")
        text = str(steps[p])
        columns = ("", text) if stream_of(steps[p]) is StreamType.COMM else (text, "")
        note = f"<- {marks[p]}" if marks.get(p) else ""
        arrow = "->" if p in marks else "  "
        lines.append(f"{arrow} {p:>{digits}}  {columns[0]:<{left}}  {columns[1]:<{right}}  {note}".rstrip())
        previous = p
    if positions and previous != len(steps) - 1:
        lines.append(f"   {'...':>{digits}}")
    return "\n".join(lines)
