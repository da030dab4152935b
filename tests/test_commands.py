"""The commands that try, check and show schedules."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from layernodes.cli import main
from layernodes.plan import schedules
from layernodes.plan.schedule import Schedule
from layernodes.plan.shape import ChunkShape

_SMALL = ("--layers", "2", "--hidden", "16", "--experts", "2", "--microbatches", "2")


@pytest.mark.parametrize("streams", ["inline", "threads"])
@pytest.mark.parametrize("extra", [(), ("--wgrad", "auto"), ("--split-combine", "--mtp")])
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
    # Two forwards woven draw dropout in another order than the plain model: the verdict says so.
    assert main(["run", "--schedule", str(path), *_SMALL]) == 1
    assert "NOT EQUAL" in capsys.readouterr().out
    Schedule(schedules.serial(shape, 2).steps[:-1]).save(path)
    assert main(["run", "--schedule", str(path), *_SMALL]) == 1
    assert "B1.pre_process is missing" in capsys.readouterr().err


def test_unknown_schedule_is_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    """A name that is no built-in and no file gets one line that lists the built-ins."""
    assert main(["run", "--schedule", "nonsense", *_SMALL]) == 2
    error = capsys.readouterr().err
    assert "no built-in schedule (serial, combined_1f1b" in error
    assert error.count("\n") == 1


def test_check_valid_and_not(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """``check`` exits with 0 for a valid schedule, with 1 and every violation for one that is not."""
    shape = ChunkShape.of(["moe", "dense"], wgrad=True)
    path = tmp_path / "one.json"
    valid = schedules.deferred(schedules.serial(shape, 2), shape, "end")
    valid.save(path)
    arguments = ["check", str(path), "--layers", "moe,dense", "--microbatches", "2", "--wgrad"]
    assert main(arguments) == 0
    assert f"valid: {len(valid)} steps" in capsys.readouterr().out
    Schedule([*valid.steps[:3], *valid.steps[4:], valid.steps[0]]).save(path)
    assert main([*arguments, "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert [(v["rule"], v["step"]) for v in report["violations"]] == [
        ("duplicate", "F0.pre_process"),
        ("missing", str(valid.steps[3])),
    ]


def test_check_says_where_a_file_is_malformed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A file that holds no schedule is named with line and column."""
    path = tmp_path / "bad.txt"
    path.write_text("F0.pre_process\nF0.L0.mlp!\n")
    assert main(["check", str(path)]) == 1
    assert "bad.txt" in (out := capsys.readouterr().out)
    assert "line 2" in out
    assert main(["check", str(tmp_path / "none.txt")]) == 2


def test_show_prints_what_parses_back(capsys: pytest.CaptureFixture[str]) -> None:
    """``show`` draws a grid; with ``--text`` and ``--json`` it prints what reads back."""
    arguments = ["show", "combined_1f1b", "--layers", "3", "--microbatches", "2"]
    expected = schedules.combined_1f1b(ChunkShape.of(["moe"] * 3), 2)
    assert main([*arguments, "--text"]) == 0
    assert Schedule.parse(capsys.readouterr().out) == expected
    assert main([*arguments, "--json"]) == 0
    assert Schedule.from_json(capsys.readouterr().out) == expected
    assert main(arguments) == 0
    assert "F0.L2.moe_combine" in capsys.readouterr().out


@pytest.mark.parametrize("wrong", [("--layers", "-1"), ("--microbatches", "0")])
def test_bad_shapes_are_wrong_usage(wrong: tuple[str, str]) -> None:
    """Numbers that make no shape are wrong usage."""
    assert main(["show", "serial", *wrong]) == 2
