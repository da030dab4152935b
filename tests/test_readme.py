"""The README's code runs as it stands."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

from layernodes import Slot
from layernodes.cli import main
from layernodes.demo.data import make_microbatches, read_text
from layernodes.demo.model import build_model
from layernodes.demo.settings import DemoSettings
from layernodes.demo.world import demo_world

_README = (Path(__file__).parents[1] / "README.md").read_text()


def test_python_blocks_run_in_order(capsys: pytest.CaptureFixture[str]) -> None:
    """All blocks together are one program, given a model and a microbatch."""
    blocks = re.findall(r"^```python\n(.*?)^```", _README, flags=re.DOTALL | re.MULTILINE)
    assert len(blocks) == 4
    with demo_world() as world:
        model = build_model(DemoSettings(layers=2), num_ranks=1, device=world.device)
        (microbatch,) = make_microbatches(read_text(None).content, 1, rank=0, num_ranks=1, device=world.device)
        program = {"model": model, **microbatch._asdict()}
        exec(compile(blocks[0], "README.md", "exec"), program)
        loss = program["loss"].detach().clone()
        assert all(parameter.grad is not None for parameter in model.parameters())
        exec(compile(blocks[1], "README.md", "exec"), program)
        scaled = program["loss"].detach().clone()
        for block in blocks[2:]:
            # Megatron-Core's loop cannot follow a backward outside of it: it keeps that one's scale, of another shape.
            MoEAuxLossAutoScaler.main_loss_backward_scale = None
            exec(compile(block, "README.md", "exec"), program)
        assert len(program["result"].outputs) == 2
        assert len(program["losses"]) == 4
    assert "moe_dispatch" in capsys.readouterr().out
    assert loss.shape == microbatch.labels.shape
    assert not torch.equal(loss, scaled)


def test_slot_table_is_complete() -> None:
    """The table names every slot of Megatron-Core's five and the class that fills it."""
    rows = dict(re.findall(r"^\| `(\w+)` \| \w+ \| `(\w+)`", _README, flags=re.MULTILINE))
    assert list(rows) == [slot.value for slot in Slot if slot is not Slot.POST_COMBINE]


def test_files_to_read_exist() -> None:
    """The files that a newcomer is sent to are there."""
    root = Path(__file__).parents[1]
    named = re.findall(r"^\d\. `(\S+)`", _README, flags=re.MULTILINE)
    assert len(named) == 4
    assert all((root / name).is_file() for name in named)


def test_options_that_the_readme_names_exist(capsys: pytest.CaptureFixture[str]) -> None:
    """Options of ``layernodes demo`` in the README are in its help."""
    with pytest.raises(SystemExit, match="0"):
        main(["demo", "--help"])
    known = capsys.readouterr().out
    assert all(option in known for option in re.findall(r"layernodes demo (--[a-z-]+)", _README))


def test_pictures_exist_and_are_small() -> None:
    """What the README shows is there, and a clone stays quick."""
    root = Path(__file__).parents[1]
    pictures = re.findall(r"!\[[^]]+\]\((\S+)\)", _README)
    assert pictures
    assert all(0 < (root / name).stat().st_size < 100_000 for name in pictures)
