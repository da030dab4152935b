"""What a plan does, as pydantic models that print and dump to JSON."""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import BaseModel, ConfigDict
from torch.nn import Module

from layernodes.nodes import ScheduleNode
from layernodes.slots import ExtraSlot, Slot
from layernodes.state import spelling


class NodeDescription(BaseModel):
    """One slot of a layer plan.

    Attributes:
        slot, stream: where and on what the node runs.
        node: name of its class.
        reads, writes: handoffs, name to type, in this layer.
        frees_input: whether it permits freeing its input early; done only where proved safe.
        copies: why it works on or hands on copies under Megatron-Core's own node class; empty under ``install()``.
        with_backward: names of the trainable parameters whose gradients come with ``B``.
        wgrad: names of those whose gradients come with ``W``.
    """

    model_config = ConfigDict(frozen=True)

    slot: str
    stream: str
    node: str
    reads: dict[str, str]
    writes: dict[str, str]
    frees_input: bool
    copies: tuple[str, ...]
    with_backward: tuple[str, ...]
    wgrad: tuple[str, ...]


class LayerDescription(BaseModel):
    """A layer plan: the layer's class and its nodes in slot order."""

    model_config = ConfigDict(frozen=True)

    layer: str
    nodes: tuple[NodeDescription, ...]

    def __str__(self) -> str:
        rows = [("slot", "stream", "node", "reads", "writes", "frees input")]
        for node in self.nodes:
            freed = "where proved safe" if node.frees_input else "no"
            handoffs = (", ".join(node.reads) or "-", ", ".join(node.writes) or "-")
            rows.append((node.slot, node.stream, node.node, *handoffs, freed))
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows)
        return "\n".join((self.layer, *lines))


def describe_layer(layer: Module, nodes: Mapping[Slot | ExtraSlot, ScheduleNode]) -> LayerDescription:
    """Describe the nodes of one layer."""
    names = {id(parameter): name for name, parameter in layer.named_parameters()}
    return LayerDescription(
        layer=type(layer).__name__, nodes=tuple(_describe_node(node, slot, names) for slot, node in nodes.items())
    )


def _describe_node(node: ScheduleNode, slot: Slot | ExtraSlot, names: Mapping[int, str]) -> NodeDescription:
    deferred = {id(parameter): parameter for parameter in node.wgrad_parameters}
    trainable = {id(p): p for module in node.modules() for p in module.parameters() if p.requires_grad}
    return NodeDescription(
        slot=slot.value if isinstance(slot, Slot) else slot.name,
        stream=node.stream.value,
        node=type(node).__name__,
        reads={name: spelling(kind) for name, kind in node._reads.items()},
        writes={name: spelling(kind) for name, kind in node._writes.items()},
        frees_input=node.frees_input(),
        copies=node.copies(),
        with_backward=tuple(names.get(key, "?") for key in trainable if key not in deferred),
        wgrad=tuple(names.get(key, "?") for key in deferred),
    )
