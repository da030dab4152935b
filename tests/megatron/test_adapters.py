"""Modules in a linear's place that have no ``backward_dw``, such as adapters: deferral goes around them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Linear, Module

import layernodes
from layernodes import ChunkPlan, LayerPlan, Slot, schedules
from tests.support.build import make_microbatches, make_model
from tests.support.compare import _ORDERS
from tests.support.configs import by_name
from tests.support.fixtures import MEGATRON_WORLD, megatron_world  # noqa: F401
from tests.support.held_back import HoldingLinear, hold_back
from tests.support.wgrads import run

pytestmark = MEGATRON_WORLD


class Adapter(Module):
    """A low-rank adapter around one of Megatron-Core's linears, which returns ``(output, bias)`` as they do."""

    def __init__(self, base: Any) -> None:
        super().__init__()
        self.base = base
        self.down = Linear(base.weight.shape[1], 2, bias=False)
        self.up = Linear(2, base.weight.shape[0], bias=False)

    def forward(self, x: Tensor, *arguments: Any, **options: Any) -> tuple[Tensor, Any]:
        """The linear's output, and the adapter's added."""
        output, bias = self.base(x, *arguments, **options)
        return output + self.up(self.down(x)), bias


class Attention(Module):
    """Attention of the user's own, without ``backward_dw``."""

    def __init__(self, own: Any) -> None:
        super().__init__()
        self.own = own

    def forward(self, *arguments: Any, **options: Any) -> Any:
        """Megatron-Core's."""
        return self.own(*arguments, **options)


def _adapt(owner: Any, *names: str) -> None:
    for name in names:
        setattr(owner, name, Adapter(getattr(owner, name)))


def _adapted(cell: Any, kind: str) -> tuple[Any, list[HoldingLinear]]:
    model = make_model(cell)
    held = []
    torch.manual_seed(1)
    for layer in model.decoder.layers:
        attention, mlp = layer.self_attention, layer.mlp
        if kind == "attention":
            held.append(hold_back(attention, "linear_proj"))
            _adapt(attention, "linear_qkv", "linear_proj")
        elif kind == "experts":
            held += [hold_back(expert, "linear_fc2") for expert in mlp.experts.local_experts]
            for expert in mlp.experts.local_experts[::2]:
                _adapt(expert, "linear_fc1", "linear_fc2")
        elif kind == "shared and latent":
            _adapt(mlp.shared_experts, "linear_fc1", "linear_fc2")
            _adapt(mlp, "fc1_latent_proj", "fc2_latent_proj")
        else:
            layer.self_attention = Attention(attention)
    return model, held


def _kinds(test: Any) -> Any:
    return pytest.mark.parametrize("kind", ["attention", "experts", "shared and latent", "attention of one's own"])(
        test
    )


def _cell(kind: str) -> Any:
    return by_name("latent-shared-ep1" if kind == "shared and latent" else "alltoall-shared-gate-ep1")


def _expected(model: Any, held: list[HoldingLinear], microbatches: list[Any]) -> dict[str, Tensor | None]:
    """The plain model's gradients; the model is as before."""
    for microbatch in microbatches:
        model(**microbatch.inputs).backward(microbatch.output_grad)
    for module in held:
        while module.queue:
            module.backward_dw()
        module.drained = 0
    found = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad()
    return found


def _check(model: Any, held: list[HoldingLinear], microbatches: list[Any], expected: Any) -> None:
    assert [module.drained for module in held] == [len(microbatches)] * len(held)
    for name, parameter in model.named_parameters():
        want = expected[name]
        assert want is parameter.grad or torch.equal(parameter.grad, want), name


@_kinds
@pytest.mark.parametrize("is_on", [True, False], ids=["flag on", "flag off"])
def test_under_our_runner(kind: str, is_on: bool) -> None:
    """What holds gradients back inside an adapter is asked for them once a microbatch."""
    cell = _cell(kind)
    microbatches = make_microbatches(cell)
    model, held = _adapted(cell, kind)
    expected = _expected(model, held, microbatches)
    for layer in model.decoder.layers:
        layer.config.delay_wgrad_compute = is_on
    chunk = ChunkPlan.build(model, wgrad="auto")
    order = schedules.deferred(schedules.combined_1f1b(chunk.shape, len(microbatches)), chunk.shape, "end")
    run(order, chunk, [dict(m.inputs) for m in microbatches], loss_grads=[m.output_grad for m in microbatches])
    _check(model, held, microbatches, expected)


@_kinds
def test_under_megatrons_plan(kind: str) -> None:
    """The same hooks, which Megatron-Core's own nodes call."""
    cell = _cell(kind)
    microbatches = make_microbatches(cell)
    model, held = _adapted(cell, kind)
    expected = _expected(model, held, microbatches)
    for layer in model.decoder.layers:
        layer.config.overlap_moe_expert_parallel_comm = layer.config.delay_wgrad_compute = True
    with layernodes.install():
        _ORDERS["1f1b"](model, microbatches)
    _check(model, held, microbatches, expected)


def test_what_needs_no_way_around_goes_megatrons_way() -> None:
    """Attention, shared experts and all experts at once."""
    layer: Any = make_model(by_name("alltoall-shared-gate-ep1")).decoder.layers[0]
    nodes = LayerPlan.build(layer, wgrad="auto").nodes
    hooks: list[Any] = [nodes[slot].wgrad_hook() for slot in (Slot.PRE_DISPATCH_COMPUTATION, Slot.MLP)]
    assert [hook._modules for hook in hooks] == [(layer.backward_dw_wrapper,), (layer.mlp.experts,)]
