"""Extra slots: a shape and a plan put them in the same order, directly after what they follow."""

from __future__ import annotations

from collections.abc import Callable
from itertools import permutations

import pytest
import torch
from torch.nn import Linear

from layernodes import (
    ChunkPlan,
    ChunkShape,
    ExtraSlot,
    LayerPlan,
    LayerRegistry,
    NodeContext,
    PlanError,
    ScheduleNode,
    Slot,
    StreamType,
)

A, B, C = ExtraSlot("a", after=Slot.MLP), ExtraSlot("b", after="a"), ExtraSlot("c", after=Slot.MLP)


def _node(at: Slot | ExtraSlot) -> type[ScheduleNode]:
    class Node(ScheduleNode):
        slot = at
        stream = StreamType.COMPUTE

        def __init__(self, layer: Linear) -> None:
            self.layer = layer

        def forward(self, ctx: NodeContext, *inputs: torch.Tensor) -> torch.Tensor:
            return self.layer(inputs[0])

    return Node


def _shape(*extras: ExtraSlot) -> list[str]:
    (layer,) = ChunkShape.of(["dense"], extra_slots=extras).layers
    return [slot.name for slot in layer.slots if slot.name not in tuple(Slot)]


def _plan(*extras: ExtraSlot) -> list[str]:
    plan = LayerPlan.build(Linear(1, 1), nodes={slot: _node(slot) for slot in (*extras, Slot.MLP)})
    (layer,) = ChunkPlan.of([plan]).shape.layers
    ours = [slot.name for slot in layer.slots if slot.name not in tuple(Slot)]
    assert ours == [slot.name for slot in plan.nodes if isinstance(slot, ExtraSlot)]
    return ours


@pytest.mark.parametrize("of", [_shape, _plan])
@pytest.mark.parametrize("extras", [*permutations([A, B, C])])
def test_each_directly_after_what_it_follows(of: Callable[..., list[str]], extras: tuple[ExtraSlot, ...]) -> None:
    """Wherever ``b`` is listed, it stands behind ``a``; of ``a`` and ``c``, which follow one slot, the first listed."""
    assert of(*extras) == (["a", "b", "c"] if extras.index(A) < extras.index(C) else ["c", "a", "b"])


def test_a_registry_and_nodes_together() -> None:
    """A slot that is registered may follow one that only this plan has."""
    registry = LayerRegistry().register(Linear, {Slot.MLP: _node(Slot.MLP), B: _node(B)})
    assert [*LayerPlan.build(Linear(1, 1), registry=registry, nodes={A: _node(A)}).nodes] == [Slot.MLP, A, B]


@pytest.mark.parametrize("of", [_shape, _plan])
@pytest.mark.parametrize(
    ("extras", "message"),
    [
        ([B], "extra slot b follows a; this layer has pre_dispatch_computation, .*, b$"),
        (
            [A, ExtraSlot("a", after=Slot.MOE_COMBINE)],
            "two extra slots share a name: a, a; give each a name of",
        ),
        ([ExtraSlot("a", after="b"), B, C], "extra slots a, b follow one another in a circle; let one follow a Slot"),
        ([ExtraSlot("a", after="a")], "extra slots a follow one another in a circle"),
    ],
)
def test_refusals(of: Callable[..., list[str]], extras: list[ExtraSlot], message: str) -> None:
    """One that follows nothing, or itself through others, is a PlanError in both."""
    with pytest.raises(PlanError, match=message):
        of(*extras)
