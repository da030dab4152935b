"""Nodes of a user's own layer classes, by type."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor
from torch.nn import Module

from layernodes import (
    ChunkPlan,
    LayerPlan,
    LayerRegistry,
    PlanError,
    ScheduleNode,
    Slot,
    StreamType,
    UnsupportedLayerError,
    schedules,
)
from tests.support.fixtures import MEGATRON_WORLD, megatron_world  # noqa: F401
from tests.support.hybrid import stack_spec
from tests.support.hybrid_cells import hybrid_cell
from tests.support.runs import Bench, random_schedule

pytestmark = MEGATRON_WORLD


class Scale(Module):
    """A layer that no library knows, with the constructor and the call of a ``HybridStack``'s layers."""

    def __init__(self, config: Any, layer_number: int = 1, **_: Any) -> None:
        super().__init__()
        self.layer_number = layer_number
        self.weight = torch.nn.Parameter(torch.linspace(0.5, 1.5, config.hidden_size))

    def forward(self, hidden_states: Tensor, **_: Any) -> Tensor:
        """``[s, b, h]`` to the same."""
        return hidden_states * self.weight + hidden_states.sin()


class ScaleMore(Scale):
    """A subclass, which nobody registered."""


class ScaleNode(ScheduleNode):
    """Runs a ``Scale``."""

    slot = Slot.PRE_DISPATCH_COMPUTATION
    stream = StreamType.COMPUTE

    def __init__(self, layer: Scale) -> None:
        self.layer = layer

    def forward(self, ctx: Any, *inputs: Tensor) -> Tensor:
        return self.layer(inputs[0])


class OtherScaleNode(ScaleNode):
    """Another node for the same layers."""


class Attention(TransformerLayer):
    """A Megatron-Core layer with a ``forward`` of its own, which the plan would skip."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output, context = super().forward(*args, **kwargs)
        return 2 * output, context


class AttentionNode(ScheduleNode):
    """Runs an ``Attention`` as it is."""

    slot = Slot.PRE_DISPATCH_COMPUTATION
    stream = StreamType.COMPUTE

    def __init__(self, layer: Attention) -> None:
        self.layer = layer

    def forward(self, ctx: Any, *inputs: Tensor) -> Tensor:
        chunk = ctx.chunk_state
        return self.layer(inputs[0], attention_mask=None, rotary_pos_emb=chunk.rotary_pos_emb)[0]


class _StackBench(Bench):
    """A bench over a hybrid model whose mixers, or attention, are other classes."""

    def __init__(self, pattern: str, registry: LayerRegistry | None, **replaced: Any) -> None:
        self.registry = registry
        with pytest.MonkeyPatch.context() as patch:

            def spec(*args: Any, **kwargs: Any) -> Any:
                made = stack_spec(*args, **kwargs)
                for name, module in replaced.items():
                    getattr(made.submodules, name).module = module
                return made

            patch.setattr("tests.support.build.stack_spec", spec)
            super().__init__(hybrid_cell(pattern))

    def chunk(self, *, split_combine: bool = False) -> ChunkPlan:
        """The plan, with the registry."""
        if split_combine not in self._chunks:
            self._chunks[split_combine] = ChunkPlan.build(self.model, registry=self.registry)
        return self._chunks[split_combine]


def _scale_layer() -> Any:
    class Config:
        hidden_size = 4

    return ScaleMore(Config())


@pytest.mark.parametrize("pattern", ["MEM", "M*E", "M"])
def test_registered_layers_anywhere_in_a_stack(pattern: str) -> None:
    """First, last (with the final norm behind it) and in a group: the plain bits; a subclass is found too."""
    bench = _StackBench(pattern, LayerRegistry().register(Scale, {ScaleNode.slot: ScaleNode}), mamba_layer=ScaleMore)
    for order in (schedules.combined_1f1b(bench.chunk().shape, 3), random_schedule(bench, 5)):
        assert bench.check(order, streams="threads") == []


def test_registered_subclass_of_megatrons_layer() -> None:
    """A registered class comes before Megatron-Core's own, so what its ``forward`` adds is not lost."""
    registry = LayerRegistry().register(Attention, {AttentionNode.slot: AttentionNode})
    bench = _StackBench("*E*", registry, attention_layer=Attention)
    assert bench.check(random_schedule(bench, 5)) == []
    with pytest.raises(UnsupportedLayerError, match=r"Attention overrides forward\(\)"):
        ChunkPlan.build(bench.model)


def test_unknown_layer_names_its_class_and_the_way_out() -> None:
    """Before anything runs."""
    bench = _StackBench("ME", LayerRegistry(), mamba_layer=Scale)
    wanted = r"Scale is no TransformerLayer .*registry.register\(Scale, \{Slot.MLP: MyNode, ...\}\) on a LayerRegistry"
    with pytest.raises(UnsupportedLayerError, match=wanted) as raised:
        bench.chunk()
    assert (raised.value.field, raised.value.value) == ("layer", Scale)


def test_the_nearest_class_counts() -> None:
    """A subclass may have nodes of its own; ``nodes`` comes before the registry."""
    registry = LayerRegistry().register(Scale, {ScaleNode.slot: ScaleNode})
    layer = _scale_layer()
    assert type(LayerPlan.build(layer, registry=registry).nodes[ScaleNode.slot]) is ScaleNode
    registry.register(ScaleMore, {OtherScaleNode.slot: OtherScaleNode})
    assert type(LayerPlan.build(layer, registry=registry).nodes[ScaleNode.slot]) is OtherScaleNode
    given = LayerPlan.build(layer, registry=registry, nodes={ScaleNode.slot: ScaleNode})
    assert type(given.nodes[ScaleNode.slot]) is ScaleNode
    assert repr(registry) == "LayerRegistry(Scale, ScaleMore)"


def test_a_plan_built_anew_keeps_its_registry() -> None:
    """``ChunkPlan.of(..., wgrad=...)`` builds each plan again."""
    plan = LayerPlan.build(_scale_layer(), registry=LayerRegistry().register(Scale, {ScaleNode.slot: ScaleNode}))
    assert type(ChunkPlan.of([plan], wgrad="auto").layers[0].nodes[ScaleNode.slot]) is ScaleNode


@pytest.mark.parametrize(
    "layer_type, nodes, wanted",
    [
        (int, {ScaleNode.slot: ScaleNode}, "cannot register <class 'int'>"),
        (Scale, {}, "Scale is registered without nodes"),
        (Module, {ScaleNode.slot: ScaleNode}, "Module is registered already"),
    ],
)
def test_refusals(layer_type: Any, nodes: Any, wanted: str) -> None:
    """What cannot be registered."""
    with pytest.raises(PlanError, match=wanted):
        LayerRegistry().register(Module, {ScaleNode.slot: ScaleNode}).register(layer_type, nodes)


def test_nodes_for_the_wrong_slot_are_refused_when_the_plan_is_built() -> None:
    """As for nodes given directly."""
    registry = LayerRegistry().register(Scale, {Slot.MLP: ScaleNode})
    with pytest.raises(PlanError, match=r"Slot.MLP\] is ScaleNode, which is a node for pre_dispatch_computation"):
        LayerPlan.build(_scale_layer(), registry=registry)
