"""What the options of a shape say of a schedule in a file, to the commands that simulate it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from layernodes import cli
from layernodes.plan import pairs, schedules
from layernodes.plan.costs import CostModel, SlotCost
from layernodes.plan.shape import ChunkShape

_COSTS = CostModel(
    kinds={
        "moe": {
            "pre_dispatch_computation": SlotCost(F=1, B=1),
            "moe_dispatch": SlotCost(F=5, B=5),
            "mlp": SlotCost(F=9, B=9),
            "moe_combine": SlotCost(F=5, B=5),
        },
        "dense": {"pre_dispatch_computation": SlotCost(F=1, B=1), "mlp": SlotCost(F=2, B=2)},
    }
)
"""A pass of a MoE layer takes 20 s, one of a dense layer 3 s."""
_MOE = ChunkShape.of(["moe", "moe"], pre_process=False, post_process=False)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A schedule and a pair of two MoE layers, which serve a dense and a MoE layer too, and costs of both kinds."""
    monkeypatch.chdir(tmp_path)
    _COSTS.save("costs.json")
    schedules.serial(_MOE, 1).save("own.txt")
    pairs.serial(_MOE, _MOE).save("pair.txt")


def output(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    capsys.readouterr()
    assert cli.main(list(words)) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "seconds"),
    [
        ([], 80),
        (["--no-ends"], 80),
        (["--layers", "2"], 80),
        (["--layers", "dense,moe"], 46),
        (["--layers", "dense*2", "--no-ends"], 12),
    ],
)
@pytest.mark.parametrize("words", [["own.txt"], ["pair.txt", "--pair"]])
def test_pass_throughs_cost_nothing(
    words: list[str], options: list[str], seconds: float, capsys: pytest.CaptureFixture[str]
) -> None:
    """Which steps do nothing the options say; what they leave open is read off the steps."""
    words = [*words, "--costs", "costs.json", *options]
    assert json.loads(output(capsys, "simulate", *words, "--json"))["makespan"] == seconds
    found = json.loads(output(capsys, "explain", *words, "--json"))
    assert (found["makespan"], found["simulated"]) == (seconds, seconds)
    assert "no whole schedule" not in output(capsys, "simulate", *words)


def test_traces_too(capsys: pytest.CaptureFixture[str]) -> None:
    """The kinds of layers of a run are not in its trace."""
    output(capsys, "trace", "own.txt", "--costs", "costs.json", "--layers", "dense,moe", "-o", "run.json")
    explain = ["explain", "run.json", "--costs", "costs.json", "--json"]
    assert json.loads(output(capsys, *explain))["simulated"] == 80
    assert json.loads(output(capsys, *explain, "--layers", "dense,moe"))["simulated"] == 46


def test_steps_of_mtp_post_process(capsys: pytest.CaptureFixture[str]) -> None:
    """A step of a slot that only MTP layers use needs no cost where the options say that there are none."""
    text = Path("own.txt").read_text()
    Path("own.txt").write_text(text.replace("F0.L0.moe_combine", "F0.L0.moe_combine F0.L0.mtp_post_process"))
    words = ["explain", "own.txt", "--costs", "costs.json", "--layers", "2", "--json"]
    assert json.loads(output(capsys, *words))["makespan"] == 80


@pytest.mark.parametrize("command", ["simulate", "explain", "trace", "plot"])
def test_options_that_do_not_fit(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Wrong usage: the shape that the options say, the first step that it has not, and what to change."""
    assert cli.main([command, "own.txt", "--costs", "costs.json", "--layers", "1"]) == 2
    error = capsys.readouterr().err
    assert "the steps of own.txt do not fit the options, which say L0 moe: F0.L1.pre_dispatch_computation" in error
    assert "at step 4 is of a layer that does not exist: the chunk has one layer" in error
    assert "or leave them out" in error
