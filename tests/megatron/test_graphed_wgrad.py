"""Megatron-Core's CUDA-graphed weight-gradient callable (``cuda_graphs[i].backward_dw``) as a part of W."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from megatron.core.transformer.module import GraphableMegatronModule

from layernodes import ChunkPlan, LayerPlan, schedules
from tests.megatron.test_layer import _ATTENTION, _captured, _graphed_layer
from tests.support.build import make_model
from tests.support.configs import by_name
from tests.support.fixtures import MEGATRON_WORLD, megatron_world  # noqa: F401
from tests.support.wgrads import gradients, plain, run

pytestmark = MEGATRON_WORLD


@pytest.mark.parametrize("place", ["after_b", "end"])
@pytest.mark.parametrize("name", ["alltoall-moe-ep1", "dense"])
def test_it_runs_in_the_w_of_the_replayed_slot(name: str, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once for each microbatch, that of the graph that the microbatch replayed; all gradients are the plain layer's."""
    monkeypatch.setattr(GraphableMegatronModule, "_te_cuda_graph_replay", _captured)
    cell = replace(by_name(name), position="none")
    layer, theirs = _graphed_layer(cell, _ATTENTION), make_model(cell).decoder.layers[0]
    layer.config.delay_wgrad_compute = True
    batches = [torch.randn(6, 2, 32, requires_grad=True) for _ in range(3)]
    expected = plain(lambda x: theirs(hidden_states=x, attention_mask=None)[0], batches)
    steps: list[Any] = []
    drained: list[tuple[str, int]] = []
    layer.cuda_graphs = [_Graph(number, steps, drained) for number in range(3)]
    chunk = ChunkPlan.of([LayerPlan.build(layer, wgrad="auto")])
    order = schedules.deferred(schedules.combined_1f1b(chunk.shape, 3), chunk.shape, place)

    def before(step: Any) -> None:
        steps.append(step)
        layer.current_microbatch = step.microbatch if str(step).startswith("F") else -1

    found = run(order, chunk, batches, before_step=before)
    assert drained == [(f"W{m}.L0.pre_dispatch_computation", m) for m in range(3)]
    assert len(layer.replays) == 3
    ours = gradients(layer)
    for key, gradient in gradients(theirs).items():
        assert gradient is not None
        assert torch.equal(gradient, ours[key]), key
    assert all(torch.equal(a, b) for a, b in zip(expected, found.input_grads, strict=True))


class _Graph:
    """One microbatch's graph: notes in which step it was asked for its weight gradients."""

    def __init__(self, number: int, steps: list[Any], drained: list[tuple[str, int]]) -> None:
        self._number, self._steps, self._drained = number, steps, drained

    def backward_dw(self) -> None:
        """Replay the graph's weight gradients."""
        self._drained.append((str(self._steps[-1]), self._number))
