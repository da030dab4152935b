"""The command that tries a schedule on a real model, and wrong usage of those that check one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from layernodes.cli import main
from layernodes.plan import schedules
from layernodes.plan.costs import CostModel
from layernodes.plan.schedule import Schedule
from layernodes.plan.shape import ChunkShape
from layernodes.plan.simulate import simulate
from layernodes.plan.timeline import Timeline

_SMALL = ("--layers", "2", "--hidden", "16", "--experts", "2", "--microbatches", "2")


@pytest.mark.parametrize("streams", ["inline", "threads"])
@pytest.mark.parametrize("extra", [(), ("--wgrad", "auto"), ("--split-combine", "--mtp", "2")])
def test_run_is_bitwise_equal(streams: str, extra: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    """``run`` compares a real model under a built-in schedule with the plain model."""
    assert main(["run", "--schedule", "combined_1f1b", "--streams", streams, "--json", *_SMALL, *extra]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["verdict"]["equal"]
    assert report["verdict"]["gradients"] > 20
    assert report["makespan"] > 0


def test_run_takes_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """``run`` takes a schedule from a file, and says what is wrong with one that is not valid."""
    shape = ChunkShape.of(["moe", "moe"])
    path = tmp_path / "own.txt"
    schedules.forward_forward(shape, 2).save(path)
    # Two forwards woven draw dropout in another order than the plain model: it says so, and what to do.
    assert main(["run", "--schedule", str(path), *_SMALL]) == 1
    text = capsys.readouterr().out
    assert "NOT EQUAL" in text
    assert "run it with --no-dropout" in text
    assert main(["run", "--no-dropout", *_SMALL, str(path)]) == 0
    assert "bitwise equal" in capsys.readouterr().out
    Schedule(schedules.serial(shape, 2).steps[:-1]).save(path)
    assert main(["run", "--schedule", str(path), *_SMALL]) == 1
    assert "B1.pre_process is missing" in capsys.readouterr().err


def test_run_says_which_options_a_file_is_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A file of another model gets the options that it was made for, not a violation for each of its steps."""
    path = tmp_path / "own.txt"
    shape = ChunkShape.of(["moe", "moe", "dense"], wgrad=True, split_combine=True)
    schedules.combined_1f1b(shape, 3).save(path)
    assert main(["run", *_SMALL, str(path)]) == 2
    error = capsys.readouterr().err
    assert len(error.splitlines()) == 1
    for advice in ("--microbatches 3", "--wgrad auto", "--layers 3 --dense-last", "--split-combine"):
        assert f"{advice}" in error
    path.write_text("F0.L0.mlp B1.L0.mlp", encoding="utf-8")
    assert main(["run", *_SMALL, str(path)]) == 2
    assert "as a pair has, and run takes whole microbatches" in capsys.readouterr().err


def test_run_writes_what_it_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The trace reads back as every step of the run, explains itself, and is drawn."""
    trace, picture = tmp_path / "trace.json", tmp_path / "picture.svg"
    words = ["--schedule", "combined_1f1b", "--split-combine", "--json", "--trace", str(trace), "--plot", str(picture)]
    assert main(["run", *_SMALL, *words]) == 0
    report = json.loads(capsys.readouterr().out)
    timeline = Timeline.from_perfetto(trace)
    assert len(timeline) == report["steps"]
    assert timeline.makespan == pytest.approx(report["makespan"])
    assert picture.stat().st_size > 1000
    assert main(["explain", str(trace)]) == 0
    assert "exposed communication: " in capsys.readouterr().out


def test_profile_writes_costs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A file of costs with their spread that the other commands take; a table, or with --json the same costs."""
    path = tmp_path / "costs.json"
    words = ["--repetitions", "2", "--warmup", "1", "--wgrad", "auto", "--streams", "threads", "-o", str(path)]
    assert main(["profile", *_SMALL, *words]) == 0
    text = capsys.readouterr().out
    costs = CostModel.load(path)
    assert "medians of 2 runs on 1 rank, streams threads" in text
    assert costs.measurement is not None
    assert costs.kinds["moe"]["mlp"].W > 0
    assert main(["simulate", "serial", "--costs", str(path), "--layers", "2", "--wgrad", "--json"]) == 0
    simulated = json.loads(capsys.readouterr().out)
    shape = ChunkShape.of(["moe", "moe"], wgrad=True)
    assert simulated["makespan"] == pytest.approx(simulate(schedules.serial(shape, 2), costs).makespan)
    assert main(["profile", *_SMALL, *words, "--json"]) == 0
    assert CostModel.from_json(capsys.readouterr().out) == CostModel.load(path)


def test_unknown_schedule_is_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    """A name that is no built-in and no file gets one line that lists the built-ins."""
    assert main(["run", "--schedule", "nonsense", *_SMALL]) == 2
    error = capsys.readouterr().err
    assert "neither a built-in schedule (serial, combined_1f1b" in error
    assert error.count("\n") == 1


def test_check_says_where_a_file_is_malformed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A file that holds no schedule is named with line and column; one that is not there is wrong usage."""
    path = tmp_path / "bad.txt"
    path.write_text("F0.pre_process\nF0.L0.mlp!\n")
    assert main(["check", str(path)]) == 2
    error = capsys.readouterr().err
    assert "bad.txt" in error
    assert "line 2" in error
    assert main(["check", str(tmp_path / "none.txt")]) == 2


def test_run_refuses_a_place_for_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    """A place for W steps without deferral is wrong usage, before a model is built."""
    assert main(["run", *_SMALL, "--wgrad-place", "end"]) == 2
    assert "nothing is deferred; add --wgrad auto" in capsys.readouterr().err
