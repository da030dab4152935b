"""The code and the commands of the page on timelines run as they stand."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from layernodes.cli import main
from layernodes.demo.data import make_microbatches, read_text
from layernodes.demo.model import build_model
from layernodes.demo.settings import DemoSettings
from layernodes.demo.world import demo_world
from layernodes.plan.causes import Cause

_PAGE = (Path(__file__).parents[1] / "docs" / "timelines.md").read_text()


def _blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", _PAGE, flags=re.DOTALL | re.MULTILINE)


def test_python_blocks_run_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """All blocks together are one program, given a model and a microbatch."""
    monkeypatch.chdir(tmp_path)
    assert len(_blocks("python")) == 4
    with demo_world() as world:
        model = build_model(DemoSettings(layers=2, hidden=32), num_ranks=1, device=world.device)
        (microbatch,) = make_microbatches(read_text(None).content, 1, rank=0, num_ranks=1, device=world.device)
        program = {"model": model, **microbatch._asdict()}
        for block in _blocks("python"):
            exec(compile(block, "timelines.md", "exec"), program)
    printed = capsys.readouterr().out
    assert re.search(r"predicted +measured\n", printed)
    assert "optimized is " in printed
    assert {path.name for path in tmp_path.iterdir()} == {"measured.json", "measured.svg", "costs.json"}


def test_commands_run_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each line of each shell block, in one folder; the schedule that the optimizer wrote is valid."""
    monkeypatch.chdir(tmp_path)
    lines = [line for block in _blocks("sh") for line in block.splitlines()]
    assert len(lines) == 7
    for line in lines:
        name, *arguments = shlex.split(line)
        assert name == "layernodes"
        assert main(arguments) == 0, line
    assert capsys.readouterr().out.rstrip().splitlines()[-1].startswith("valid: ")


def test_reasons_are_all_there() -> None:
    """The table has every cause, once."""
    assert re.findall(r"^\| `(\w+)` \|", _PAGE, flags=re.MULTILINE) == ["order", "queue", "dependency", "end"]
    assert {"order", "queue", "dependency", "end"} == set(Cause)
