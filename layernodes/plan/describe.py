"""What a plan does, as pydantic models that print and dump to JSON."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from pydantic import BaseModel, ConfigDict
from torch.nn import Module, Parameter

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
        wgrad: names of those whose gradients come with ``W``. A parameter that several nodes of the layer use stands
            once: with the first that defers it, else with the first that uses it.
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
    """A layer plan; ``str`` is a table.

    Attributes:
        layer: the layer's class, of joined layers each with ``+`` between.
        nodes: its nodes, in slot order.
        notes: what is done otherwise than in the plain layer without changing a number.
    """

    model_config = ConfigDict(frozen=True)

    layer: str
    nodes: tuple[NodeDescription, ...]
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        rows = [("slot", "stream", "node", "reads", "writes", "frees input", "gradients with B, W")]
        for node in self.nodes:
            freed = "where proved safe" if node.frees_input else "no"
            gradients = f"{len(node.with_backward)}, {len(node.wgrad)}"
            handoffs = (", ".join(node.reads) or "-", ", ".join(node.writes) or "-")
            rows.append((node.slot, node.stream, node.node, *handoffs, freed, gradients))
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows)
        return "\n".join((self.layer, *lines, *(f"note: {note}" for note in self.notes)))


def describe_layer(
    layer: Module, title: str, nodes: Mapping[Slot | ExtraSlot, ScheduleNode], notes: tuple[str, ...]
) -> LayerDescription:
    """Describe the nodes of one layer, called ``title``."""
    names = {id(parameter): name for name, parameter in layer.named_parameters()}
    deferred = _owners({slot: node.wgrad_parameters for slot, node in nodes.items()})
    used = _owners({slot: _trainable(node) for slot, node in nodes.items()})
    owners = {**used, **deferred}
    return LayerDescription(
        layer=title,
        nodes=tuple(
            _describe_node(
                node,
                slot,
                with_backward=[names.get(key, "?") for key, at in owners.items() if at == slot and key not in deferred],
                wgrad=[names.get(key, "?") for key, at in deferred.items() if at == slot],
            )
            for slot, node in nodes.items()
        ),
        notes=notes,
    )


def wgrad_names(layer: Module, node: ScheduleNode) -> list[str]:
    """Names, in ``layer``, of the parameters whose gradients come with the ``W`` of ``node``."""
    deferred = {id(parameter) for parameter in node.wgrad_parameters}
    return [name for name, parameter in layer.named_parameters() if id(parameter) in deferred]


def unheld_parameters(layer: Module, nodes: Iterable[ScheduleNode]) -> list[str]:
    """Names of the layer's trainable parameters that no node finds in its ``modules()``."""
    held = {id(parameter) for node in nodes for parameter in (*_trainable(node), *node.wgrad_parameters)}
    return [name for name, p in layer.named_parameters() if p.requires_grad and id(p) not in held]


def _trainable(node: ScheduleNode) -> list[Parameter]:
    return [p for module in node.modules() for p in module.parameters() if p.requires_grad]


def _owners(
    parameters: Mapping[Slot | ExtraSlot, Iterable[Parameter]],
) -> dict[int, Slot | ExtraSlot]:
    """The first slot of each parameter, by the parameter's id."""
    owners: dict[int, Slot | ExtraSlot] = {}
    for slot, of_slot in parameters.items():
        for parameter in of_slot:
            owners.setdefault(id(parameter), slot)
    return owners


def _describe_node(
    node: ScheduleNode, slot: Slot | ExtraSlot, *, with_backward: Iterable[str], wgrad: Iterable[str]
) -> NodeDescription:
    return NodeDescription(
        slot=slot.value if isinstance(slot, Slot) else slot.name,
        stream=node.stream.value,
        node=type(node).__name__,
        reads={name: spelling(kind) for name, kind in node._reads.items()},
        writes={name: spelling(kind) for name, kind in node._writes.items()},
        frees_input=node.frees_input(),
        copies=node.copies(),
        with_backward=tuple(with_backward),
        wgrad=tuple(wgrad),
    )
