"""Schedules as values."""

from __future__ import annotations

import dataclasses
import pickle
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from layernodes.errors import ScheduleError, ScheduleParseError
from layernodes.plan import schedules
from layernodes.plan.schedule import PairSchedule, Schedule
from layernodes.plan.shape import ChunkShape
from layernodes.plan.step import Step
from layernodes.plan.validate import validate
from tests.plan.test_step import STEPS

SCHEDULES = st.lists(STEPS, max_size=30).map(Schedule)


@settings(deadline=None)
@given(SCHEDULES)
def test_text_and_json_read_back(schedule: Schedule) -> None:
    """parse(str(s)) == s and from_json(to_json(s)) == s, for any steps whatever."""
    assert Schedule.parse(str(schedule)) == schedule
    assert Schedule.from_json(schedule.to_json()) == schedule
    assert pickle.loads(pickle.dumps(schedule)) == schedule
    assert hash(Schedule.parse(str(schedule))) == hash(schedule)


def test_sequence() -> None:
    """Schedules iterate, index, slice and add; everything gives new values."""
    schedule = Schedule.parse("F0.L0.a F0.L0.b B0.L0.b B0.L0.a")
    assert len(schedule) == 4
    assert [str(step) for step in schedule] == str(schedule).split()
    assert schedule[1] == Step.parse("F0.L0.b")
    assert schedule[:2] + schedule[2:] == schedule
    assert schedule[::-1].steps == schedule.steps[::-1]
    assert isinstance(schedule[1:], Schedule)
    assert Schedule.parse("F0.L0.a") in {schedule[:1]}
    assert schedule[0] in schedule
    assert repr(schedule) == "<Schedule of 4 steps: F0.L0.a F0.L0.b B0.L0.b ...>"


def test_shift() -> None:
    """shift renumbers microbatches, down to 0 and no further."""
    schedule = Schedule.parse("F0.L0.a B1.post_process")
    assert str(schedule.shift(2)).split() == ["F2.L0.a", "B3.post_process"]
    assert schedule.shift(2).shift(-2) == schedule
    with pytest.raises(ScheduleError, match="-1"):
        schedule.shift(-1)


def test_frozen() -> None:
    """A schedule does not change."""
    schedule = Schedule.parse("F0.L0.a")
    with pytest.raises(dataclasses.FrozenInstanceError):
        schedule.steps = ()  # type: ignore[misc]


def test_types_do_not_mix() -> None:
    """A pair is no schedule of one chunk, with the same steps neither; only steps go in."""
    schedule, pair = Schedule.parse("F0.L0.a"), PairSchedule.parse("F0.L0.a")
    assert schedule != pair
    with pytest.raises(TypeError):
        schedule + pair  # type: ignore[operator]
    with pytest.raises(ScheduleError, match=r"'F0.L0.a' is no Step; use Step.parse"):
        Schedule(["F0.L0.a"])  # type: ignore[list-item]
    with pytest.raises(ScheduleError, match=r"is no Step; unpack it: \[\*steps, ...\]"):
        Schedule([iter(schedule)])  # type: ignore[list-item]


@pytest.mark.parametrize("name", ["s.txt", "s.json", "S.JSON"])
def test_files(tmp_path: Path, name: str) -> None:
    """save and load, text and JSON, give the schedule back."""
    schedule = schedules.combined_1f1b(ChunkShape.of(["moe"], wgrad=True), 2)
    schedule.save(tmp_path / name)
    assert Schedule.load(tmp_path / name) == schedule
    assert Schedule.load(str(tmp_path / name)) == schedule


def test_bad_files(tmp_path: Path) -> None:
    """The error names the file and every bad place in it; other suffixes are refused."""
    (tmp_path / "s.txt").write_text("F0.L0.a\nF0.L0\n", encoding="utf-8")
    with pytest.raises(ScheduleParseError, match=r"s\.txt cannot be read: line 2, column 6") as caught:
        Schedule.load(tmp_path / "s.txt")
    assert caught.value.line == 2
    (tmp_path / "s.json").write_text('{"steps": [\n  "F0.L0"]}', encoding="utf-8")
    with pytest.raises(ScheduleParseError, match=r"s\.json cannot be read: line 2, column 9"):
        Schedule.load(tmp_path / "s.json")
    for call in (Schedule().save, Schedule.load):
        with pytest.raises(ScheduleError, match=r"name it \.txt or \.json"):
            call(tmp_path / "s.yaml")
    with pytest.raises(FileNotFoundError):
        Schedule.load(tmp_path / "none.txt")


def _large() -> tuple[Schedule, ChunkShape]:
    shape = ChunkShape.of(["moe"] * 61, wgrad=True)
    return schedules.combined_1f1b(shape, 32), shape


def test_large_schedule_works() -> None:
    """61 layers x 32 microbatches print, parse, validate and go through JSON."""
    schedule, shape = _large()
    assert len(schedule) == 32 * (61 * 10 + 4)
    assert Schedule.parse(str(schedule)) == schedule
    assert Schedule.from_json(schedule.to_json()) == schedule
    validate(schedule, shape, num_microbatches=32)


@pytest.mark.full
def test_large_schedule_is_quick() -> None:
    """... each in less than a second."""
    schedule, shape = _large()
    text, json = str(schedule), schedule.to_json()
    for work in (
        lambda: Schedule.parse(text),
        lambda: str(schedule),
        lambda: validate(schedule, shape, num_microbatches=32),
        lambda: Schedule.from_json(json),
        schedule.to_json,
        schedule.grid,
    ):
        start = time.perf_counter()
        work()
        assert time.perf_counter() - start < 1
