"""``describe()`` names each trainable parameter of a layer once: with its B or with its W."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from torch.nn import Linear, Module, ModuleDict

from layernodes import CombineNode, LayerPlan, Slot
from tests.support.build import make_model
from tests.support.configs import CELLS
from tests.support.fixtures import MEGATRON_WORLD, megatron_world  # noqa: F401
from tests.support.further import FURTHER
from tests.support.wgrads import FirstNode, ModuleNode

pytestmark = MEGATRON_WORLD

_KINDS = (
    "dense",
    "linear-bias",
    "shared",
    "mtp",
    "latent",
    "mla",
    "recompute",
    "grouped",
    "frozen",
    "mixed",
    "qk-norm",
    "deepep",
    "hybridep",
    "expert-bias",
)
_CELLS = [cell for cell in (*CELLS, *FURTHER) if cell.world_size == 1 and any(kind in cell.name for kind in _KINDS)]


def _names(layer: Module, **options: Any) -> Counter[str]:
    nodes = LayerPlan.build(layer, **options).describe().nodes
    return Counter(name for node in nodes for name in (*node.with_backward, *node.wgrad))


@pytest.mark.parametrize("kind", _KINDS)
def test_the_sum_over_the_nodes_is_every_trainable_parameter_once(kind: str) -> None:
    """Every cell of the kind, with and without deferral, with the combine split and whole."""
    for cell in (cell for cell in _CELLS if kind in cell.name):
        model = make_model(cell)
        for layer in (*model.decoder.layers, *(model.mtp.layers if cell.mtp else ())):
            trainable = Counter(name for name, p in layer.named_parameters() if p.requires_grad)
            for wgrad in ("auto", "off"):
                for split_combine in (False, True):
                    found = _names(layer, wgrad=wgrad, split_combine=split_combine)
                    assert found == trainable, (cell.name, wgrad, split_combine)


def test_without_deferral_nothing_comes_with_w() -> None:
    """All of it with B."""
    layer = make_model(next(cell for cell in _CELLS if cell.name == "dense")).decoder.layers[0]
    assert all(node.wgrad == () for node in LayerPlan.build(layer).describe().nodes)


def test_what_megatrons_linears_defer() -> None:
    """The weights of the linears; biases, norms and the router come with B."""
    cell = next(cell for cell in CELLS if cell.name == "latent-shared-ep1")
    nodes = {
        node.slot: node for node in LayerPlan.build(make_model(cell).decoder.layers[0], wgrad="auto").describe().nodes
    }
    assert set(nodes["pre_dispatch_computation"].wgrad) == {
        "self_attention.linear_proj.weight",
        "self_attention.linear_qkv.weight",
        "mlp.fc1_latent_proj.weight",
        "mlp.shared_experts.linear_fc1.weight",
        "mlp.shared_experts.linear_fc2.weight",
    }
    assert "mlp.router.weight" in nodes["pre_dispatch_computation"].with_backward
    assert all(".experts.local_experts." in f".{name}" for name in nodes["mlp"].wgrad)
    assert len(nodes["mlp"].wgrad) == 4
    assert nodes["moe_combine"].wgrad == ("mlp.fc2_latent_proj.weight",)


def test_what_a_recompute_runs_again_comes_with_b() -> None:
    """Its linears run during backward, in a graph of their own."""
    cell = next(cell for cell in CELLS if cell.name == "recompute-shared-ep1")
    nodes = {
        node.slot: node for node in LayerPlan.build(make_model(cell).decoder.layers[0], wgrad="auto").describe().nodes
    }
    assert "mlp.shared_experts.linear_fc1.weight" in nodes["pre_dispatch_computation"].with_backward


def test_a_parameter_that_two_nodes_use_stands_with_the_one_that_defers_it() -> None:
    """Else with the first that uses it."""

    class Plain(FirstNode):
        def deferred_parameters(self) -> tuple[Any, ...]:
            return ()

    layer = Linear(3, 3)
    nodes: dict[Any, Any] = {Slot.PRE_DISPATCH_COMPUTATION: Plain, Slot.MLP: ModuleNode}
    first, second = LayerPlan.build(layer, nodes=nodes, wgrad="auto").describe().nodes
    assert (first.with_backward, first.wgrad) == (("bias",), ())
    assert (second.with_backward, second.wgrad) == ((), ("weight",))


def test_a_module_that_a_subclass_of_a_layers_node_holds() -> None:
    """Its weight is deferred by that node."""
    model = make_model(next(cell for cell in CELLS if cell.name == "alltoall-moe-ep1"))
    layer = model.decoder.layers[0]

    class Gated(CombineNode):
        def __init__(self, layer: Any) -> None:
            super().__init__(layer)
            self.gate = Linear(32, 1)

    plan = LayerPlan.build(layer, nodes={Slot.MOE_COMBINE: Gated}, wgrad="auto")
    node = plan.nodes[Slot.MOE_COMBINE]
    assert [tuple(p.shape) for p in node.wgrad_parameters] == [(1, 32)]


def test_the_table_says_how_many() -> None:
    """Printed, a plan shows each node's number of parameters with B and with W."""
    layer = ModuleDict({"a": Linear(3, 3), "b": Linear(3, 3, bias=False)})
    nodes: dict[Any, Any] = {
        Slot.PRE_DISPATCH_COMPUTATION: lambda it: FirstNode(it["a"]),
        Slot.MLP: lambda it: ModuleNode(it["b"]),
    }
    lines = str(LayerPlan.build(layer, nodes=nodes, wgrad="auto").describe()).splitlines()
    assert lines[1].endswith("gradients with B, W")
    assert [line.rsplit("  ", 1)[-1] for line in lines[2:]] == ["1, 1", "0, 1"]
