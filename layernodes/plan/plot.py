"""A timeline as a picture: two streams, phases told apart by colour, lightness and hatching, exposure marked.

Long timelines are broken into rows, as text is into lines, so that steps stay wide enough to be seen at 60 layers as
at 4. Needs matplotlib; ``Timeline.plot`` loads this module when it is called.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, Final, final

import matplotlib as mpl
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from layernodes.errors import ScheduleError
from layernodes.plan.file_kinds import PICTURE_ENDINGS
from layernodes.plan.units import in_bytes, in_seconds
from layernodes.slots import Phase, Slot, StreamType

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from layernodes.plan.timeline import Interval, Timeline

_STEPS_IN_A_ROW: Final = 44
_MOST_ROWS: Final = 24
_WIDTH: Final = 15.0
_ROW_HEIGHT: Final = 1.35
_FONT: Final = 7.0
_TITLE: Final = 72
"""Characters that fit beside the legend."""


@final
@dataclass(frozen=True, slots=True)
class _Look:
    """Colours whose lightness differs too, from light to dark: B, W, F; and a hatching for W."""

    name: str
    face: str
    text: str
    hatch: str = ""


_LOOKS: Final = {
    Phase.F: _Look("forward", "#1f4e9c", "white"),
    Phase.B: _Look("backward", "#f2c879", "black"),
    Phase.W: _Look("weight gradients", "#8fbf9f", "black", "////"),
}
_EXPOSED: Final = "#c81e3c"
_LANES: Final = {StreamType.COMPUTE: 1.0, StreamType.COMM: 0.0}
_LANE_NAMES: Final = {StreamType.COMPUTE: "compute", StreamType.COMM: "comm"}
_SHORT: Final = {
    str(Slot.PRE_DISPATCH_COMPUTATION): "attn",
    str(Slot.MOE_DISPATCH): "disp",
    str(Slot.MLP): "mlp",
    str(Slot.MOE_COMBINE): "comb",
    str(Slot.POST_COMBINE): "post",
    str(Slot.MTP_POST_PROCESS): "mtp",
    "pre_process": "pre",
    "post_process": "post",
}


def plot(timeline: Timeline, path: Path, *, title: str | None = None) -> None:
    """Draw a timeline into a file.

    Args:
        timeline: the timeline.
        path: a PNG, SVG or PDF file.
        title: a line above the figures; None: none.

    Raises:
        ScheduleError: the name of the file ends in no format that can be drawn.
        OSError: the file cannot be written.
    """
    if path.suffix.lower() not in PICTURE_ENDINGS:
        raise ScheduleError(f"cannot draw {path}; name it {', '.join(PICTURE_ENDINGS)}")
    # A fixed salt and no date: the same timeline gives the same file.
    with mpl.rc_context({"svg.hashsalt": "layernodes", "hatch.linewidth": 0.6, "svg.fonttype": "none"}):
        figure = draw(timeline, title=title)
        metadata = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}.get(path.suffix.lower())
        figure.savefig(path, dpi=130, metadata=metadata)


def draw(timeline: Timeline, *, title: str | None = None) -> Figure:
    """The figure of a timeline."""
    rows = min(_MOST_ROWS, max(1, ceil(len(timeline) / _STEPS_IN_A_ROW)))
    height = _ROW_HEIGHT * rows + 1.5
    figure = Figure(figsize=(_WIDTH, height))
    FigureCanvasAgg(figure)
    figure.subplots_adjust(left=0.06, right=0.985, top=1 - 0.85 / height, bottom=0.62 / height, hspace=0.42)
    span = timeline.makespan / rows
    unit, scale = _unit(timeline.makespan)
    for row in range(rows):
        axes = figure.add_subplot(rows, 1, row + 1)
        begin = timeline.start + row * span
        _draw_row(axes, timeline, begin, span, scale)
    figure.axes[-1].set_xlabel(f"time ({unit})", fontsize=9)
    share = 100 * timeline.exposed_communication / timeline.makespan if timeline.makespan else 0.0
    facts = (
        f"makespan {in_seconds(timeline.makespan)}, exposed communication "
        f"{in_seconds(timeline.exposed_communication)} ({share:.1f} %)"
    )
    if timeline.peak_activation_bytes:
        facts += f", peak activations {in_bytes(timeline.peak_activation_bytes)}"
    heading = title or "Timeline"
    if len(heading) > _TITLE:
        heading = f"{heading[: _TITLE - 1]}…"
    figure.text(0.06, 1 - 0.3 / height, heading, fontsize=12, weight="bold", va="center")
    figure.text(0.06, 1 - 0.58 / height, facts, fontsize=9, va="center")
    handles = [
        Patch(facecolor=look.face, hatch=look.hatch, edgecolor="black", linewidth=0.5, label=look.name)
        for look in _LOOKS.values()
    ]
    handles.append(
        Patch(facecolor="none", edgecolor=_EXPOSED, hatch="xxxx", linewidth=1.2, label="exposed communication")
    )
    figure.legend(
        handles=handles,
        loc="upper right",
        bbox_to_anchor=(0.985, 1 - 0.12 / height),
        ncols=4,
        fontsize=9,
        frameon=False,
    )
    return figure


def _draw_row(axes: Axes, timeline: Timeline, begin: float, span: float, scale: float) -> None:
    """One row: the steps, cut at its ends, and the exposed moments between the lanes."""
    end = begin + span
    bars: dict[tuple[Phase, StreamType], list[tuple[float, float]]] = {}
    for interval in timeline.intervals:
        start, stop = max(interval.start, begin), min(interval.end, end)
        if stop <= start:
            continue
        look, lane = _LOOKS[interval.step.phase], _LANES[interval.stream]
        bar = (scale * (start - timeline.start), scale * (stop - start))
        bars.setdefault((interval.step.phase, interval.stream), []).append(bar)
        label = _label(interval, (stop - start) / span)
        if label:
            axes.text(
                scale * ((start + stop) / 2 - timeline.start),
                lane + 0.44,
                label,
                ha="center",
                va="center",
                fontsize=_FONT,
                color=look.text,
                linespacing=1.05,
                bbox={"facecolor": look.face, "edgecolor": "none", "pad": 1.8} if look.hatch else None,
            )
    for (phase, stream), places in bars.items():
        look, lane = _LOOKS[phase], _LANES[stream]
        axes.broken_barh(
            places, (lane + 0.06, 0.76), facecolors=look.face, hatch=look.hatch, edgecolors="black", linewidth=0.4
        )
    exposed = [(scale * (a - timeline.start), scale * (b - a)) for a, b in _exposed(timeline, begin, end)]
    axes.broken_barh(exposed, (1.06, 0.76), facecolors="none", edgecolors=_EXPOSED, hatch="xxxx", linewidth=1.0)
    axes.set_xlim(scale * (begin - timeline.start), scale * (end - timeline.start) or 1)
    axes.set_ylim(-0.06, 1.94)
    axes.set_yticks([lane + 0.44 for lane in _LANES.values()], [_LANE_NAMES[stream] for stream in _LANES], fontsize=9)
    axes.tick_params(axis="x", labelsize=8, length=3, pad=2)
    axes.tick_params(axis="y", length=0)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)


def _exposed(timeline: Timeline, begin: float, end: float) -> list[tuple[float, float]]:
    """The exposed moments within a row: where communication runs and computation does not."""
    computing = sorted((i.start, i.end) for i in timeline.on(StreamType.COMPUTE) if i.end > begin and i.start < end)
    found = []
    for comm in timeline.on(StreamType.COMM):
        at, last = max(comm.start, begin), min(comm.end, end)
        for start, stop in computing:
            if stop <= at:
                continue
            if start >= last:
                break
            if start > at:
                found.append((at, start))
            at = max(at, stop)
        if at < last:
            found.append((at, last))
    return found


def _label(interval: Interval, share: float) -> str:
    """What fits into a bar that is this share of a row: slot, layer and microbatch, or less, or nothing."""
    step = interval.step
    slot = _SHORT.get(step.slot, step.slot[:6])
    where = f"m{step.microbatch}" if step.layer is None else f"L{step.layer} m{step.microbatch}"
    short = "" if step.layer is None else f"L{step.layer}"
    room = share * _WIDTH * 0.925 * 72 / (_FONT * 0.62)  # characters
    if room >= max(len(where), len(slot)) + 1:
        return f"{slot}\n{where}"
    if room >= max(len(slot), len(short)) + 0.6:
        return f"{slot}\n{short}" if short else slot
    return short if short and room >= len(short) + 0.6 else ""


def _unit(makespan: float) -> tuple[str, float]:
    if makespan >= 1:
        return "s", 1.0
    return ("ms", 1e3) if makespan >= 1e-3 else ("us", 1e6)
