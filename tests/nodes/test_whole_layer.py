"""Layers that are one slot: each against the plain layer, called."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.transformer.identity_op import IdentityFuncOp, IdentityOp

import layernodes
from layernodes import ChunkPlan, LayerPlan, Runner, Slot, UnsupportedLayerError, schedules
from tests.support.build import _layer_spec, make_model, reset_globals
from tests.support.compare import run_cell
from tests.support.configs import Cell
from tests.support.fixtures import MEGATRON_WORLD, megatron_world  # noqa: F401
from tests.support.handed import handed_over
from tests.support.hybrid_cells import hybrid_cell

pytestmark = MEGATRON_WORLD

_PRE, _MLP = Slot.PRE_DISPATCH_COMPUTATION, Slot.MLP
_MOE = [_PRE, Slot.MOE_DISPATCH, _MLP, Slot.MOE_COMBINE]
_SLOTS = {"*": [_PRE], "M": [_PRE], "G": [_PRE], "-": [_MLP], "E": _MOE}
_SHARED = {"moe_shared_expert_intermediate_size": 24}
_DROPOUT = {"hidden_dropout": 0.2, "attention_dropout": 0.1}


def _layer(symbol: str, **config: Any) -> Any:
    model = make_model(hybrid_cell(symbol, config=config, position="none"))
    assert isinstance(model, HybridModel)
    return model.decoder.layers[0]


def _gradients(layer: Any) -> dict[str, Any]:
    found = {name: p.grad for name, p in layer.named_parameters()}
    layer.zero_grad(set_to_none=True)
    return found


def _run_plain(layer: Any, hidden: torch.Tensor) -> dict[str, Any]:
    """The layer called as the stack calls it."""
    reset_globals(3)
    leaf = hidden.clone().requires_grad_()
    output = layer(hidden_states=leaf, attention_mask=None)
    output = output[0] if isinstance(output, tuple) else output
    output.backward(torch.ones_like(output))
    return {"output": output.detach(), "input": leaf.grad, **_gradients(layer)}


def _run_plan(layer: Any, hidden: torch.Tensor, wgrad: str) -> dict[str, Any]:
    reset_globals(3)
    chunk = ChunkPlan.of([LayerPlan.build(layer, wgrad=wgrad)])
    with Runner(streams="threads") as runner:
        leaf = hidden.clone().requires_grad_()
        result = runner.run(schedules.serial(chunk.shape, 1), chunk, [leaf])
    return {"output": result.outputs[0], "input": result.input_grads[0], **_gradients(layer)}


@pytest.mark.parametrize("wgrad", ["off", "auto"])
@pytest.mark.parametrize(
    "config", [{}, _DROPOUT, {"moe_shared_expert_intermediate_size": 24}], ids=["", "drop", "shared"]
)
@pytest.mark.parametrize("symbol", _SLOTS)
def test_equal_to_the_layer(symbol: str, config: dict[str, Any], wgrad: str) -> None:
    """Output, input gradient and parameter gradients, bit for bit; and the slots that it has."""
    layer = _layer(symbol, **config)
    assert list(LayerPlan.build(layer).nodes) == _SLOTS[symbol]
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(8, 2, 32, generator=generator)
    expected = _run_plain(layer, hidden)
    actual = _run_plan(layer, hidden, wgrad)
    assert expected.keys() == actual.keys()
    assert [name for name in expected if not torch.equal(expected[name], actual[name])] == []


@pytest.mark.parametrize("symbol", "*M-")
def test_what_is_described(symbol: str) -> None:
    """One node, whose matrices come with W and the rest with B."""
    plan = LayerPlan.build(_layer(symbol), wgrad="auto")
    (node,) = plan.describe().nodes
    names = dict(plan.layer.named_parameters())
    assert {*node.wgrad, *node.with_backward} == set(names)
    assert all(names[name].dim() == 1 for name in node.with_backward)
    assert node.node == {"*": "AttentionNode", "M": "MixerNode", "-": "MLPNode"}[symbol]


def test_slots_that_are_not_there() -> None:
    """A node for a slot that passes through has nothing to stand in for; a caller of the five gets its input back."""
    layer = _layer("*")
    with pytest.raises(layernodes.PlanError, match=r"\(attention\) has no slot 'mlp'"):
        LayerPlan.build(layer, nodes={_MLP: layernodes.MLPNode})
    funcs = LayerPlan.build(layer).forward_funcs
    hidden = torch.ones(1)
    assert funcs.mlp(None, hidden) is hidden
    with pytest.raises(NotImplementedError):
        funcs.moe_dispatch(None, hidden)


@pytest.mark.parametrize("left_out", [("mlp", "mlp_bda", "pre_mlp_layernorm"), ("self_attention", "self_attn_bda")])
@pytest.mark.parametrize("layers", ["DM", "MD"])
def test_in_a_gpt_model_under_megatrons_plan(left_out: tuple[str, ...], layers: str) -> None:
    """First or last in a ``GPTModel``: Megatron-Core's plan, which calls all five slots, gives the plain bits."""

    def spec(cell: Cell, config: Any, *, is_moe: bool) -> Any:
        made = _layer_spec(cell, config, is_moe=is_moe)
        if not is_moe:
            for name in left_out:
                setattr(made.submodules, name, IdentityFuncOp if name.endswith("bda") else IdentityOp)
        return made

    cell = Cell(name="gpt", layers=layers)
    with mock.patch("tests.support.build._layer_spec", spec):
        verdicts = [run_cell(cell, context) for context in (layernodes.install, handed_over)]
    assert [verdict.status for verdict in verdicts] == ["right", "right"]


def test_moe_layer_without_attention_has_no_hook_for_it() -> None:
    """The identity in attention's place has no ``backward_dw``."""
    plan = LayerPlan.build(_layer("E"))
    assert plan.backward_dw["pre_dispatch_computation"] == []
    assert layernodes.get_layer_moe_metadata(plan.layer) == (True, 2)
    assert layernodes.get_layer_moe_metadata(_layer("M")) == (False, None)


def test_held_back_gradients_need_deferral() -> None:
    """Transformer Engine's linears in a mixer, made with ``delay_wgrad_compute``, are the node's to drain."""
    layer = _layer("M")
    layer.config.delay_wgrad_compute = True

    class Held(torch.nn.Linear):
        calls = 0

        def backward_dw(self) -> None:
            Held.calls += 1

    Held.__module__ = "transformer_engine.pytorch"
    layer.mixer.in_proj = Held(32, 64, bias=False)
    with pytest.raises(UnsupportedLayerError, match="hold their weight gradients back"):
        LayerPlan.build(layer)
    hooks = LayerPlan.build(layer, wgrad="auto").backward_dw["pre_dispatch_computation"]
    assert layer.mixer.in_proj.weight in set(hooks.parameters())
    layer.config.delay_wgrad_compute = False
    assert LayerPlan.build(layer).backward_dw["pre_dispatch_computation"] == []
