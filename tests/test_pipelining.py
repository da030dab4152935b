"""Pair schedules inside torch's pipelining: the numbers are torch's own, and overlapped actions really interleave."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from layernodes import ChunkPlan, LayerPlan, OptionError, Runner
from layernodes.pipelining import ChunkStage, overlap
from tests.support import toy
from tests.support.ranks import values_on_ranks


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    """What two ranks found, in one process group."""
    return values_on_ranks("tests.support.pipelining_cases:dual_pipe_v", seconds=280.0, group_seconds=120.0)


def test_numbers_are_torchs_own(ranks: list[dict[str, Any]]) -> None:
    """Losses and gradients under three pairs, weight gradients deferred or not, inline and on threads, twice."""
    for rank, found in enumerate(ranks):
        assert found["count"] == (24 if rank == 0 else 16)  # 8 losses where the last stage is
        cases = {name: value for name, value in found.items() if name[-1].isdecimal()}
        assert len(cases) == 16
        assert [name for name, is_equal in cases.items() if not is_equal] == []


def test_what_step_is_called_with_reaches_overlapped_actions(ranks: list[dict[str, Any]]) -> None:
    """Arguments of the loss function, and whether outputs are kept, of one call after the other on the same stages."""
    for found in ranks:
        assert found["options"] == {
            f"{name}{of}": True for name in ("scaled", "none", "lean") for of in ("", " outputs")
        }


def test_complex_stages(ranks: list[dict[str, Any]]) -> None:
    """Gradients go back through stages of complex tensors, to the first."""
    assert [found["complex"] for found in ranks] == [True, True]


def test_autocast_holds_wherever_steps_run(ranks: list[dict[str, Any]]) -> None:
    """On whatever thread autograd goes backward: that of the caller, in overlapped and in plain actions."""
    for found in ranks:
        assert found["autocast"] == dict.fromkeys(
            ["casts", "inline True", "inline False", "threads True", "threads False"], True
        )


@pytest.mark.parametrize("rank", [0, 1])
def test_overlapped_actions_interleave(ranks: list[dict[str, Any]], rank: int) -> None:
    """Between the steps of one forward stand backward steps, in Megatron-Core's order; not so in the serial pair."""
    usual = "B1.L1.moe_combine F0.L0.pre_dispatch_computation B1.L1.mlp F0.L0.moe_dispatch"
    assert usual in " ".join(ranks[rank]["inline off combined_1f1b steps"])
    assert usual not in " ".join(ranks[rank]["inline off serial steps"])
    assert "B1.L1.mlp W1.L1.mlp F0.L0.moe_dispatch" in " ".join(ranks[rank]["inline auto combined_1f1b steps"])


def test_what_does_not_fit_is_refused() -> None:
    chunk = ChunkPlan.of([LayerPlan.build(layer, nodes=toy.NODES) for layer in toy.toys(1)])
    with Runner("inline") as runner:
        stage = ChunkStage(chunk, runner)
        assert [p.shape for p in stage.parameters()] == [p.shape for p in chunk.layers[0].layer.parameters()]
        leaf = torch.randn(2, 8, dtype=torch.float64, requires_grad=True)
        output = stage(leaf)
        (gradient,) = torch.autograd.grad(output.sum(), leaf)
        other = leaf.detach().requires_grad_()
        (expected,) = torch.autograd.grad(chunk.layers[0].layer(other).sum(), other)
        assert torch.equal(gradient, expected)
        saved: list[torch.Tensor] = []
        with torch.no_grad(), torch.autograd.graph.saved_tensors_hooks(saved.append, lambda _: leaf):
            assert torch.equal(stage(leaf), output)
        assert saved == []
    with pytest.raises(OptionError, match=r"str has no OVERLAP_F_B actions; use torch's ScheduleDualPipeV"):
        overlap("schedule")  # type: ignore[arg-type]
