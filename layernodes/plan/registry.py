"""Nodes for layer classes of a user's own, by type."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, Self, final

from torch.nn import Module

from layernodes.errors import PlanError
from layernodes.nodes import ScheduleNode
from layernodes.plan.arguments import check_argument
from layernodes.slots import ExtraSlot, Slot

SlotKey = Slot | ExtraSlot
"""What a plan's nodes are filed under."""

NodeFactory = Callable[[Any], ScheduleNode]
"""A node class, or any callable that takes the layer and returns a node for it."""

_NOTHING: Final[Mapping[SlotKey, NodeFactory]] = {}


@final
class LayerRegistry:
    """Which nodes run a layer, by the layer's class. Give it to ``LayerPlan.build``, ``ChunkPlan.build`` or
    ``layernodes.megatron.schedule`` as ``registry``.

    Subclasses are included: the nearest registered class of a layer counts. A registered class comes before
    Megatron-Core's own, so a subclass of ``TransformerLayer`` may be registered too. Slots that are not named pass
    through.

    Example::

        registry = LayerRegistry().register(ConvLayer, {Slot.PRE_DISPATCH_COMPUTATION: ConvNode})
        chunk = ChunkPlan.build(model, registry=registry)
    """

    def __init__(self) -> None:
        self._nodes: dict[type, Mapping[SlotKey, NodeFactory]] = {}

    def register(self, layer_type: type[Module], nodes: Mapping[SlotKey, NodeFactory]) -> Self:
        """Register the nodes of a layer class and of its subclasses; returns the registry.

        Args:
            layer_type: the class.
            nodes: node class or factory (called with the layer) for every slot that such a layer uses.

        Raises:
            PlanError: no class of modules, no nodes, or a class that is registered already.
        """
        if not (isinstance(layer_type, type) and issubclass(layer_type, Module)):
            raise PlanError(f"cannot register {layer_type!r}; give a class derived from torch.nn.Module")
        if layer_type in self._nodes:
            raise PlanError(f"{layer_type.__name__} is registered already; make another LayerRegistry for other nodes")
        check_argument("nodes", nodes, Mapping)
        if not nodes:
            raise PlanError(f"{layer_type.__name__} is registered without nodes; name one for every slot that it uses")
        self._nodes[layer_type] = dict(nodes)
        return self

    def find(self, layer: Module) -> Mapping[SlotKey, NodeFactory]:
        """The nodes of a layer's class or nearest base class; empty where neither is registered."""
        return next((self._nodes[base] for base in type(layer).__mro__ if base in self._nodes), _NOTHING)

    def __repr__(self) -> str:
        return f"LayerRegistry({', '.join(kind.__name__ for kind in self._nodes)})"


def registry_of(given: LayerRegistry | None) -> LayerRegistry:
    """The registry that was given, or an empty one; raises ArgumentError where it is none."""
    check_argument("registry", given, LayerRegistry, type(None))
    return given or LayerRegistry()
