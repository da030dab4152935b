"""The examples of the documentation run, and say that the bits are the plain model's."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from layernodes.testing import Check, check_node
from tests.support.full import FULL
from tests.support.launched import launched

_ROOT = Path(__file__).parents[1]
_FOLDER = _ROOT / "docs" / "examples"
_EXAMPLES = ("override_hook", "add_handoff", "replace_slot", "extra_slot")


def _run(name: str, **options: Any) -> list[str]:
    """The lines that an example prints; those of two ranks may end later than the next one begins."""
    done = launched(str(_FOLDER / f"{name}.py"), **options)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.parametrize("name", _EXAMPLES)
def test_example(name: str) -> None:
    """The last line is the verdict."""
    lines = _run(name, really=FULL or name == "extra_slot")
    assert lines[-1].startswith("bitwise equal: losses and "), lines
    if name == "extra_slot":
        assert lines[-2] == "4 probes, of two equal microbatches: True"
        assert "F1.L0.probe" in lines[-3]


@pytest.fixture
def own_moe() -> Iterator[Any]:
    """The module of ``own_moe.py``, in a process group of this process alone."""
    spec = importlib.util.spec_from_file_location("own_moe", _FOLDER / "own_moe.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield module
    dist.destroy_process_group()


class TestOwnLayer:
    """A layer in plain torch, brought by a user."""

    def test_nodes(self, own_moe: Any) -> None:
        torch.manual_seed(0)
        batches = [torch.randn(5, own_moe.SIZE) for _ in range(3)]
        for node in own_moe.NODES.values():
            report = check_node(
                node, own_moe.MoeLayer(), batches, nodes=own_moe.NODES, plain=own_moe.MoeLayer.forward, examples=4
            )
            assert (report.done, report.notes) == (tuple(Check), ())

    def test_two_processes(self) -> None:
        lines = _run("own_moe", world_size=2)
        assert "".join(lines) == 2 * "bitwise equal: 24 tensors, 2 processes"

    def test_length(self) -> None:
        """It is short, and knows nothing of Megatron-Core."""
        text = (_FOLDER / "own_moe.py").read_text()
        assert len(text.splitlines()) < 150
        assert "megatron" not in text.replace("Megatron-Core is used", "")


def test_dual_pipe_v() -> None:
    """torch's pipelining, with and without interleaved slots."""
    lines = _run("dual_pipe_v", world_size=2)
    expected = (
        "bitwise equal: 16 losses and gradients of rank 0",
        "bitwise equal: 8 losses and gradients of rank 1",
    )
    assert "".join(lines) in ("".join(expected), "".join(reversed(expected)))
