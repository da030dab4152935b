"""Parameters that several nodes use: more than once in one node, and frozen when the plan is built."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import layer_norm

import layernodes
from layernodes import ChunkPlan, schedules
from tests.support.compare import run_cell
from tests.support.configs import Cell, by_name
from tests.support.fixtures import MEGATRON_WORLD, megatron_world  # noqa: F401
from tests.support.runs import Bench

pytestmark = MEGATRON_WORLD


def _twice(self: torch.nn.LayerNorm, x: Tensor) -> Tensor:
    once = layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)
    return layer_norm(once, self.normalized_shape, self.weight, self.bias, self.eps)


def test_each_use_is_added_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """A repeated MTP layer's norms, each used twice in its node: to the sum of the later depth autograd adds one use
    after the other, ``(sum + a) + b``, as in the plain model, and not ``sum + (a + b)``."""
    monkeypatch.setattr(torch.nn.LayerNorm, "forward", _twice)
    verdict = run_cell(by_name("mtp-repeated-ep1"), layernodes.install)
    assert verdict.status == "right", verdict


def test_trained_after_the_build() -> None:
    """A tied embedding, frozen while the plan is built: one gradient a microbatch, and hooks that fire once each."""
    bench = Bench(Cell(name="tied", layers="D", tied=True, num_microbatches=2))
    weight = bench.model.embedding.word_embeddings.weight
    weight.requires_grad_(False)
    chunk = ChunkPlan.build(bench.model)
    weight.requires_grad_(True)
    calls: list[int] = []
    with weight.register_post_accumulate_grad_hook(lambda _: calls.append(1)):
        schedule = schedules.serial(chunk.shape, 2)
        actual, expected = bench.run(schedule, chunk=chunk), bench.expected(schedule)
    name = "grad/embedding.word_embeddings.weight"
    found, wanted = actual[name], expected[name]
    assert found is not None and wanted is not None and torch.equal(found, wanted)
    assert len(calls) == 2
