"""Timelines in all their forms: figures, text, trace and picture. (Hand-worked figures: ``test_simulate``.)"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from matplotlib.colors import to_rgb

from layernodes.errors import MissingExtraError, ScheduleError
from layernodes.plan import pairs, plot, schedules
from layernodes.plan.costs import CostModel
from layernodes.plan.presets import PRESETS
from layernodes.plan.schedule import Schedule
from layernodes.plan.shape import ChunkShape
from layernodes.plan.simulate import simulate
from layernodes.plan.step import Step
from layernodes.plan.timeline import Interval, Timeline
from layernodes.plan.units import in_bytes, in_seconds
from layernodes.slots import Phase, StreamType
from tests import oracle

COSTS = CostModel.simple(computation=2, communication=3)
SHAPE = ChunkShape.of(["moe"] * 2, wgrad=True, pre_process=False, post_process=False)


def small() -> Timeline:
    """Two layers, forward: attention 2, dispatch 3, mlp 2, combine 3, twice."""
    return simulate(schedules.forward_only(SHAPE, 1), COSTS)


def measured(*spans: tuple[str, float, float]) -> Timeline:
    """A timeline as a runner would measure it."""

    def interval(text: str, start: float, end: float) -> Interval:
        step = Step.parse(oracle.long(text))
        stream = StreamType.COMM if text.endswith((".d", ".c")) else StreamType.COMPUTE
        return Interval(step, stream, start, end)

    return Timeline(tuple(interval(*span) for span in spans))


def test_empty() -> None:
    """No steps: all figures are 0, and every form can be made."""
    empty = Timeline(())
    assert empty.makespan == empty.exposed_communication == empty.peak_activation_bytes == 0
    assert empty.critical_path == ()
    assert empty.summary().num_steps == 0
    assert "no length" in empty.gantt()
    assert empty.compare(empty).speedup is None


def test_measured_gaps_are_no_exposure() -> None:
    """Where neither stream runs nothing is exposed; the first start is the beginning; the path has the longest wait."""
    timeline = measured(("F0.L0.a", 10, 11), ("F0.L0.d", 11.5, 14), ("F0.L0.m", 14.5, 16), ("F0.L0.c", 16, 17))
    assert timeline.makespan == 7
    assert timeline.exposed_communication == 3.5
    assert timeline.idle(StreamType.COMPUTE) == 4.5
    assert [str(i.step) for i in timeline.critical_path] == oracle.long("F0.L0.a F0.L0.d F0.L0.m F0.L0.c").split()
    assert timeline.peak_activation_bytes == 0


def test_exposure_is_cut_by_computation_beside_it() -> None:
    """A communication step that computation covers in its middle is exposed before and after."""
    timeline = measured(("F0.L0.a", 0, 1), ("F0.L0.d", 1, 9), ("F1.L0.a", 3, 5), ("F2.L0.a", 6, 7), ("F0.L0.m", 9, 10))
    (exposure,) = timeline.exposures
    assert exposure.seconds == 2 + 1 + 2
    assert str(exposure.waiter) == "F0.L0.mlp"


def test_summary_and_compare() -> None:
    """The figures agree with the timeline, read well, and survive JSON."""
    timeline = small()
    summary = timeline.summary()
    assert (summary.makespan, summary.exposed_communication, summary.hidden_communication) == (20, 12, 0)
    assert [e.step for e in summary.exposed_steps] == oracle.long("F0.L0.d F0.L0.c F0.L1.d F0.L1.c").split()
    assert summary.exposed_steps[-1].waiter is None
    assert type(summary).model_validate_json(summary.model_dump_json()) == summary
    assert "exposed communication  12 s (60.0 %)" in str(summary)
    assert "F0.L1.moe_combine exposes 3 s; the end of the run waits" in str(summary)
    slower = simulate(schedules.forward_only(SHAPE, 1), COSTS.scale(communication=2))
    comparison = timeline.compare(slower, names=("fast", "slow"))
    assert comparison.speedup == 20 / 32
    assert "slow is 0.625 times as fast as fast" in str(comparison)


def test_gantt() -> None:
    """Twenty seconds in twenty columns, worked out by hand."""
    lines = small().gantt(20).splitlines()
    assert lines[:4] == [
        "          0               20 s",
        "compute   FF...FF...FF...FF...",
        "comm      ..fff..fff..fff..fff",
        "exposed     ^^^  ^^^  ^^^  ^^^",
    ]
    assert all(len(line) <= 110 for line in simulate(schedules.serial(SHAPE, 2), COSTS).gantt(100).splitlines())
    with pytest.raises(ScheduleError, match="width=5"):
        small().gantt(5)


def test_perfetto(tmp_path: Path) -> None:
    """Chrome's trace format: complete events of each step on its stream's thread, in microseconds, and a counter."""
    timeline = simulate(schedules.combined_1f1b(SHAPE, 2), COSTS)
    path = tmp_path / "trace.json"
    timeline.to_perfetto(path)
    trace = json.loads(path.read_text(encoding="utf-8"))
    slices = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert [event["name"] for event in slices] == [str(i.step) for i in timeline.intervals]
    for event, interval in zip(slices, timeline.intervals, strict=True):
        assert (event["ts"], event["dur"]) == (interval.start * 1e6, interval.duration * 1e6)
        assert event["tid"] == (1 if interval.stream is StreamType.COMPUTE else 2)
        assert event["pid"] == 1
    assert sum(event["args"].get("exposed_us", 0) for event in slices) == timeline.exposed_communication * 1e6
    names = {event["args"]["name"] for event in trace["traceEvents"] if event["name"] == "thread_name"}
    assert names == {"compute stream", "comm stream"}
    counters = [event["args"]["bytes"] for event in trace["traceEvents"] if event["ph"] == "C"]
    assert max(counters) == timeline.peak_activation_bytes


def test_traces_read_back(tmp_path: Path) -> None:
    """Steps, streams, times and queues survive; what is no trace of ours says what writes one."""
    costs = CostModel.simple(computation=0.25, communication=0.375, hardware_queues=1)
    timeline = simulate(schedules.combined_1f1b(SHAPE, 2), costs)
    path = tmp_path / "trace.json"
    timeline.to_perfetto(path)
    back = Timeline.from_perfetto(path)
    assert [(i.step, i.stream) for i in back.intervals] == [(i.step, i.stream) for i in timeline.intervals]
    for one, other in zip(back.intervals, timeline.intervals, strict=True):
        assert (one.start, one.end) == pytest.approx((other.start, other.end), abs=1e-10)
    assert back.hardware_queues == 1
    assert [i.step for i in back.critical_path] == [i.step for i in timeline.critical_path]
    written = path.read_text(encoding="utf-8")
    path.write_text(written, encoding="utf-8-sig")
    assert Timeline.from_perfetto(path) == back
    for text in (written.replace('"dur": 250000.0', f'"dur": {wrong}', 1) for wrong in ("Infinity", "NaN", "-5")):
        path.write_text(text, encoding="utf-8")
        with pytest.raises(ScheduleError, match=r"trace\.json is no trace .* us and takes (inf|nan|-5) us"):
            Timeline.from_perfetto(path)
    for text in ("{}", "[]", "nonsense", '{"traceEvents": []}', '{"otherData": {"producer": "x"}, "traceEvents": []}'):
        path.write_text(text)
        with pytest.raises(ScheduleError, match=r"trace\.json is no trace that layernodes wrote .*to_perfetto"):
            Timeline.from_perfetto(path)


def luminance(color: str) -> float:
    """What is left of a colour in grey (ITU-R BT.709)."""
    red, green, blue = to_rgb(color)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def test_phases_differ_in_grey() -> None:
    """In lightness, or by hatching; texts stand out from what is behind them."""
    looks = list(plot._LOOKS.values())
    for one in looks:
        assert abs(luminance(one.face) - luminance(one.text)) > 0.4
        for other in looks:
            assert one is other or abs(luminance(one.face) - luminance(other.face)) > 0.3 or one.hatch != other.hatch


@pytest.mark.parametrize(("layers", "rows"), [(4, 1), (60, 14)])
def test_labels_do_not_overlap(layers: int, rows: int) -> None:
    """At 4 and at 60 layers no text lies over another or off the page, and most steps have a label."""
    shape, costs = ChunkShape.of(["moe"] * layers, wgrad=True), PRESETS["deepseek-v3"].costs()
    timeline = simulate(pairs.combined_1f1b(shape, shape), costs)
    figure = plot.draw(timeline, title="A title that is longer than there is room for beside the legend. " * 2)
    assert len(figure.axes) == rows
    renderer = figure.canvas.get_renderer()  # type: ignore[attr-defined]
    figure.draw(renderer)
    texts = [text for axes in figure.axes for text in axes.texts]
    assert len(texts) > 0.9 * len(timeline)
    boxes = [text.get_window_extent(renderer) for text in [*texts, *figure.texts]]
    boxes.append(figure.legends[0].get_window_extent(renderer))
    boxes += [axes.xaxis.get_tightbbox(renderer) for axes in figure.axes]
    for index, box in enumerate(boxes):
        assert not any(box.overlaps(other) for other in boxes[:index])
        assert figure.bbox.x0 <= box.x0
        assert box.x1 <= figure.bbox.x1


@pytest.mark.parametrize("suffix", [".png", ".svg", ".pdf"])
def test_plot_writes_files(suffix: str, tmp_path: Path) -> None:
    """Each format; the same timeline gives the same bytes."""
    first, second = tmp_path / f"a{suffix}", tmp_path / f"b{suffix}"
    small().plot(first)
    small().plot(second)
    assert first.read_bytes() == second.read_bytes()
    Timeline(()).plot(first, title="empty")
    with pytest.raises(ScheduleError, match=r"\.bmp"):
        small().plot(tmp_path / "a.bmp")


def test_plot_without_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Says which extra to install."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delitem(sys.modules, "layernodes.plan.plot")

    class Nothing:
        def find_spec(self, name: str, *_: object) -> None:
            if name.partition(".")[0] == "matplotlib":
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    monkeypatch.setattr(sys, "meta_path", [Nothing(), *sys.meta_path])
    with pytest.raises(MissingExtraError, match=r"layernodes\[plot\]") as caught:
        small().plot(tmp_path / "a.png")
    assert caught.value.extra == "plot"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 s"), (2.5, "2.5 s"), (0.0123, "12.3 ms"), (0.001, "1 ms"), (0.00099, "990 us"), (4.5e-6, "4.5 us")],
)
def test_seconds(seconds: float, text: str) -> None:
    """A unit that suits."""
    assert in_seconds(seconds) == text


def test_bytes() -> None:
    """Binary units."""
    assert [in_bytes(n) for n in (0, 1023, 1536, 3 << 20, 5 << 30, 7 << 40)] == [
        "0 B",
        "1023 B",
        "1.5 KiB",
        "3 MiB",
        "5 GiB",
        "7 TiB",
    ]


def test_phases_of_a_schedule_in_a_gantt() -> None:
    """Letters of the phases, in the order of the schedule."""
    steps = Schedule.parse(oracle.long("F0.L0.a F0.L0.m B0.L0.m B0.L0.a W0.L0.m W0.L0.a"))
    timeline = simulate(steps, CostModel.simple(computation=10, communication=0))
    assert timeline.gantt(60).splitlines()[1].split()[1] == "F" * 20 + "B" * 20 + "W" * 20
    assert {i.step.phase for i in timeline.intervals} == set(Phase)
