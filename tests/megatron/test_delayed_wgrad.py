"""Megatron-Core's own plan with ``delay_wgrad_compute``: it drains our hooks, on its local modules too."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
from megatron.core.models.common.utils import TransformerLayerNode
from torch.nn import Module

import layernodes
from layernodes import LayerPlan, Slot
from layernodes._megatron.plan_nodes import ProvingLayerNode
from layernodes.errors import NodeStateError, UnsupportedLayerError
from layernodes.megatron import build_layer_callables
from tests.support.build import make_microbatches, make_model
from tests.support.compare import _ORDERS, differing, run_plain, run_plan, snapshot
from tests.support.configs import Cell, by_name
from tests.support.fixtures import MEGATRON_WORLD, megatron_world  # noqa: F401

pytestmark = MEGATRON_WORLD

_FLAGS = {
    "overlap": {"overlap_moe_expert_parallel_comm": True, "delay_wgrad_compute": True},
    "alone": {"delay_wgrad_compute": True},
}
_CELLS = [
    "dense",
    "dense-tied",
    "dense-linear-bias",
    "alltoall-moe-ep1",
    "alltoall-shared-gate-ep1",
    "shared-overlap-ep1",
    "latent-shared-ep1",
    "mixed-ep1",
    "grouped-ep1",
    "mla-ep1",
    "recompute-all-ep1",
    "recompute-mlp-ep1",
    "frozen-experts-ep1",
    "frozen-first-layer-ep1",
    "alltoall-mtp-ep1",
    "mtp-tied-ep1",
    "mtp-latent-ep1",
    "mtp-dense-inner-ep1",
    "mtp-repeated-ep1",
    "bf16-ep1",
]


def _cell(name: str, flags: str, **config: Any) -> Cell:
    cell = by_name(name)
    return replace(cell, late_config=_FLAGS[flags]).with_config(**config)


@pytest.mark.parametrize("flags", _FLAGS)
@pytest.mark.parametrize("name", _CELLS)
def test_every_order_equals_the_plain_model(name: str, flags: str) -> None:
    """Serial, 1F1B over the same layers, and two microbatches slot by slot."""
    cell = _cell(name, flags)
    drawn = bool(cell.config.get("hidden_dropout"))  # random numbers are drawn in another order there
    for order in ("serial", "1f1b") if drawn else ("serial", "1f1b", "paired"):
        if order == "paired":
            cell = replace(cell, num_microbatches=2)
        expected = run_plain(cell)
        with layernodes.install():
            assert not differing(expected, run_plan(cell, order)), order  # type: ignore[arg-type]


def test_a_repeated_latent_mtp_layer() -> None:
    """Its fc2_latent_proj is used by a communication slot, twice a microbatch, and drained with the mlp slot's."""
    cell = _cell("mtp-repeated-ep1", "overlap", moe_latent_size=16)
    expected = run_plain(cell)
    with layernodes.install():
        assert not differing(expected, run_plan(cell, "serial"))
        assert not differing(expected, run_plan(cell, "1f1b"))


def test_latent_projection_is_deferred_beside_frozen_experts() -> None:
    """The mlp slot has nothing to defer then, and drains the combine slot's all the same."""
    cell = replace(_cell("latent-ep1", "overlap"), frozen=(r"mlp\.experts",))
    expected = run_plain(cell)
    with layernodes.install(), _timed(cell) as (fired, run):
        assert not differing(expected, run("serial"))
    assert {when for name, when in fired if "fc2_latent_proj" in name} == {"W"}


@contextmanager
def _timed(cell: Cell) -> Iterator[tuple[Counter[tuple[str, str]], Any]]:
    """Counts (parameter, "W" inside backward_dw or "B") over runs of the cell."""
    fired: Counter[tuple[str, str]] = Counter()
    inside: list[int] = []
    own = TransformerLayerNode.backward_dw

    def backward_dw(self: Any) -> None:
        inside.append(1)
        try:
            own(self)
        finally:
            inside.pop()

    def run(order: str) -> Any:
        model, microbatches = make_model(cell), make_microbatches(cell)
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(
                    lambda p, name=name: fired.update([(name, "W" if inside else "B")])
                )
        outputs = _ORDERS[order](model, microbatches)  # type: ignore[index]
        return snapshot(model, microbatches, outputs, {})

    TransformerLayerNode.backward_dw = backward_dw
    try:
        yield fired, run
    finally:
        TransformerLayerNode.backward_dw = own


@pytest.mark.parametrize("name", ["dense", "alltoall-shared-gate-ep1", "latent-shared-ep1", "alltoall-mtp-ep1"])
@pytest.mark.parametrize("order", ["serial", "1f1b"])
def test_weight_gradients_come_in_backward_dw_once(name: str, order: str) -> None:
    """Those that the plan says are deferred, and only those, once each microbatch."""
    cell = _cell(name, "overlap")
    model = make_model(cell)
    layers: list[Module] = [*model.decoder.layers, *(model.mtp.layers if cell.mtp else ())]
    names = {id(p): name for name, p in model.named_parameters()}
    deferred = {
        names[id(dict(layer.named_parameters())[key])]
        for layer in layers
        for node in LayerPlan.build(layer, wgrad="auto").describe().nodes
        for key in node.wgrad
    }
    assert any("linear_qkv" in key for key in deferred)
    with layernodes.install(), _timed(cell) as (fired, run):
        run(order)
    assert set(fired.values()) == {cell.num_microbatches}
    assert {key for key, when in fired if when == "W"} == deferred


def test_without_the_flag_all_gradients_come_with_backward() -> None:
    """As ever."""
    cell = by_name("dense")
    with layernodes.install(), _timed(cell) as (fired, run):
        run("serial")
    assert {when for _, when in fired} == {"B"}


def test_the_flag_is_read_when_the_plan_is_built() -> None:
    """Switched on and off during one installation."""
    cell = by_name("dense")
    with layernodes.install(), _timed(cell) as (fired, _):
        model, microbatches = make_model(cell), make_microbatches(cell)
        weight = model.decoder.layers[0].mlp.linear_fc1.weight
        weight.register_post_accumulate_grad_hook(lambda p: fired.update(["on" if flag else "off"]))
        for flag in (False, True, False):
            for layer in model.decoder.layers:
                layer.config.delay_wgrad_compute = flag
            _ORDERS["serial"](model, microbatches)
    assert fired == {"on": 3, "off": 6}


def test_the_dict_of_the_builders_is_fresh_and_mutable() -> None:
    """One hook, or a list, a slot, each with ``backward_dw`` and ``parameters``."""
    cell = _cell("latent-shared-ep1", "overlap")
    layer = make_model(cell).decoder.layers[0]
    _, first = build_layer_callables(layer)
    _, second = build_layer_callables(layer)
    assert first is not second
    assert set(first) == {"pre_dispatch_computation", "mlp"}
    assert isinstance(first["mlp"], list)
    hooks = [*first["mlp"], first["pre_dispatch_computation"]]
    names = {id(p): name for name, p in layer.named_parameters()}
    delivered = {names[id(p)] for hook in hooks for p in hook.parameters()}
    assert {"mlp.fc1_latent_proj.weight", "mlp.fc2_latent_proj.weight", "self_attention.linear_qkv.weight"} <= delivered


def test_wgrad_off_is_refused_where_modules_hold_gradients_back() -> None:
    """Nobody would drain them."""
    from tests.support.held_back import HoldingLinear, hold_back  # noqa: PLC0415

    model = make_model(_cell("dense", "alone"))
    layer = model.decoder.layers[0]
    hold_back(layer.mlp, "linear_fc1")
    assert isinstance(layer.mlp.linear_fc1, HoldingLinear)
    with pytest.raises(UnsupportedLayerError, match="wgrad='off' would never compute them"):
        LayerPlan.build(layer)
    plan = LayerPlan.build(layer, wgrad="auto")
    (mlp,) = (node for node in plan.describe().nodes if node.slot == Slot.MLP)
    assert {"mlp.linear_fc1.weight", "mlp.linear_fc2.weight"} <= set(mlp.wgrad)


def test_a_plan_that_is_never_drained_is_an_error() -> None:
    """Leaving ``install()`` says what was never computed."""
    cell = _cell("dense", "overlap")
    model, microbatches = make_model(cell), make_microbatches(cell)
    installation = layernodes.install().start()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ProvingLayerNode, "backward_dw", lambda self: None)
        _ORDERS["serial"](model, microbatches[:1])
    with pytest.raises(NodeStateError, match=r"layer 1 mlp \(mlp\.linear_fc1\.weight"):
        installation.stop()
    assert not installation.active
    with layernodes.install():
        pass
