"""Every kind of file where every other kind is wanted: told by its name, with who wrote it and who takes it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from layernodes import (
    ChunkShape,
    CostError,
    CostModel,
    LayerNodesError,
    PairSchedule,
    Schedule,
    ScheduleError,
    ScheduleParseError,
    Timeline,
    cli,
    pairs,
    schedules,
    simulate,
)

_SHAPE = ChunkShape.of(["moe"])
_NAMES = {
    "steps.txt": "steps as text",
    "schedule.json": "a schedule as JSON",
    "pair.json": "a pair as JSON",
    "trace.json": "a trace",
    "costs.json": "a cost model",
    **{f"{command}.json": "a report" for command in ("check", "simulate", "explain", "optimize", "doctor")},
}
_READERS: dict[str, tuple[Callable[[Path], object], str, type[LayerNodesError]]] = {
    "schedule": (Schedule.load, "a schedule", ScheduleParseError),
    "pair": (PairSchedule.load, "a pair", ScheduleParseError),
    "costs": (CostModel.load, "a cost model", CostError),
    "trace": (Timeline.from_perfetto, "a trace", ScheduleError),
}
_RIGHT = {("steps.txt", "schedule"), ("steps.txt", "pair"), ("schedule.json", "schedule"), ("pair.json", "pair")}
_RIGHT |= {("costs.json", "costs"), ("trace.json", "trace")}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One file of each kind."""
    folder = tmp_path_factory.mktemp("kinds")
    costs = CostModel.simple(computation=1, communication=1)
    schedule = schedules.serial(_SHAPE, 2)
    schedule.save(folder / "steps.txt")
    schedule.save(folder / "schedule.json")
    pairs.serial(_SHAPE, _SHAPE).save(folder / "pair.json")
    costs.save(folder / "costs.json")
    simulate(schedule, costs).to_perfetto(folder / "trace.json")
    with_costs = ["--layers", "1", "--costs", str(folder / "costs.json"), "--json"]
    for command, words in {
        "check": ["serial", "--json"],
        "simulate": ["serial", *with_costs],
        "explain": ["serial", *with_costs],
        "optimize": with_costs,
        "doctor": ["--json"],
    }.items():
        with pytest.MonkeyPatch.context() as patch:
            written: list[str] = []
            patch.setattr(cli, "_write", written.append)
            cli.main([command, *words])
        (folder / f"{command}.json").write_text("\n".join(written))
    return folder


@pytest.mark.parametrize("reader", _READERS)
@pytest.mark.parametrize("name", _NAMES)
def test_other_kinds_are_named(name: str, reader: str, folder: Path) -> None:
    """What is right is read; whatever else says what it is and what is wanted, in one line, without any field."""
    read, wanted, error = _READERS[reader]
    if (name, reader) in _RIGHT:
        read(folder / name)
        return
    with pytest.raises(error) as caught:
        read(folder / name)
    text = str(caught.value)
    assert f"{name} cannot be read" in text
    assert f"found {_NAMES[name]!r}, expected {wanted}" in text
    assert "wrote this, and " in text
    assert "\n" not in text


@pytest.mark.parametrize("name", ["schedule.json", "pair.json", "trace.json", "costs.json"])
def test_json_in_a_text_file(name: str, folder: Path, tmp_path: Path) -> None:
    """One place, not one a word."""
    (tmp_path / "wrong.txt").write_bytes((folder / name).read_bytes())
    with pytest.raises(ScheduleParseError, match=f"found '{_NAMES[name]}', expected steps as text") as caught:
        Schedule.load(tmp_path / "wrong.txt")
    assert len(caught.value.places) == 1


def test_text_in_a_json_file(folder: Path, tmp_path: Path) -> None:
    """Says how to name it."""
    (tmp_path / "wrong.json").write_bytes((folder / "steps.txt").read_bytes())
    with pytest.raises(ScheduleParseError, match=r"found 'steps as text', expected a schedule as JSON; .* a \.txt"):
        Schedule.load(tmp_path / "wrong.json")


def test_no_utf8(tmp_path: Path) -> None:
    """A picture, for instance."""
    (tmp_path / "picture.json").write_bytes(b"\x89PNG\xff")
    with pytest.raises(ScheduleError, match=r"picture.json cannot be read: byte 0 is no UTF-8"):
        Timeline.from_perfetto(tmp_path / "picture.json")


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["check", "trace.json"], "trace.json cannot be read: line 1, column 1: found 'a trace', expected a schedule"),
        (["show", "costs.json"], "costs.json cannot be read: line 1, column 1: found 'a cost model', expected a sched"),
        (["simulate", "steps.txt", "--costs", "schedule.json"], "found 'a schedule as JSON', expected a cost model"),
        (["simulate", "steps.txt", "--costs", "steps.txt"], "found 'steps as text', expected a cost model"),
        (["explain", "costs.json"], "found 'a cost model', expected a schedule"),
        (["check", "schedule.json", "--pair"], "found 'a schedule as JSON', expected a pair"),
        (["check", "pair.json"], "found 'a pair as JSON', expected a schedule"),
        (["simulate", "optimize.json", "--costs", "costs.json"], "-o FILE of that command writes the schedule alone"),
    ],
)
def test_on_the_command_line(
    words: list[str], text: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line, and exit code 2."""
    monkeypatch.chdir(folder)
    assert cli.main(words) == 2
    captured = capsys.readouterr()
    assert text in captured.err
    assert captured.err.count("\n") == 1
    assert captured.out == ""
