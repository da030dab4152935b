"""From a layer's kind to the nodes of its slots, built and checked."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Final

from torch.nn import Module

from layernodes._megatron.layer_kinds import LayerKind
from layernodes.errors import PlanError
from layernodes.nodes import (
    AttentionNode,
    CombineExchangeNode,
    CombineNode,
    DispatchNode,
    ExpertNode,
    MixerNode,
    MLPNode,
    MTPPostNode,
    PostCombineNode,
    PreDispatchNode,
    ScheduleNode,
)
from layernodes.plan.registry import NodeFactory, SlotKey
from layernodes.slots import ExtraSlot, Slot

_ONE_SLOT: Final[Mapping[LayerKind, Mapping[SlotKey, NodeFactory]]] = {
    LayerKind.OTHER: {},
    LayerKind.ATTENTION: {Slot.PRE_DISPATCH_COMPUTATION: AttentionNode},
    LayerKind.MLP: {Slot.MLP: MLPNode},
    LayerKind.MIXER: {Slot.PRE_DISPATCH_COMPUTATION: MixerNode},
}
"""The slots of layers that are one slot, and of a user's, which brings its own."""


def factories_of(kind: LayerKind, split_combine: bool) -> dict[SlotKey, NodeFactory]:
    """The node classes of a kind of layer, by slot."""
    if kind in _ONE_SLOT:
        return dict(_ONE_SLOT[kind])
    factories: dict[SlotKey, NodeFactory] = {Slot.PRE_DISPATCH_COMPUTATION: PreDispatchNode, Slot.MLP: ExpertNode}
    if kind.is_moe:
        factories[Slot.MOE_DISPATCH] = DispatchNode
        factories[Slot.MOE_COMBINE] = CombineExchangeNode if split_combine else CombineNode
        if split_combine:
            factories[Slot.POST_COMBINE] = PostCombineNode
    if kind.is_mtp:
        factories[Slot.MTP_POST_PROCESS] = MTPPostNode
    return factories


def factory_fault(factory: object) -> str | None:
    """What ``factory`` is and what to give in its place, where it is no node class or callable that takes the layer."""
    if isinstance(factory, ScheduleNode):
        name = type(factory).__name__
        return f"a {name}, made already; give the class, {name}, or a function that takes the layer"
    if isinstance(factory, Module):
        return (
            f"a {type(factory).__name__}, a module; give a node class, or a function that takes the layer and returns "
            f"a node"
        )
    if not callable(factory):
        return f"{factory!r}; give a node class or a callable that takes the layer"
    if isinstance(factory, type) and not issubclass(factory, ScheduleNode):
        return (
            f"the class {factory.__name__}, which is no ScheduleNode; derive it from ScheduleNode, or from the node "
            f"whose place it takes"
        )
    return None


def build_node(factory: NodeFactory, slot: SlotKey, layer: Module) -> ScheduleNode:
    """The node that a factory makes for a slot; PlanError where it makes none for that slot."""
    fault = factory_fault(factory)
    if fault is not None:
        raise PlanError(f"nodes[{name_of(slot)}] is {fault}")
    node = factory(layer)
    if not isinstance(node, ScheduleNode):
        raise PlanError(
            f"nodes[{name_of(slot)}] made {node!r} for {type(layer).__name__}; it must return a ScheduleNode"
        )
    if node.slot != slot:
        raise PlanError(
            f"nodes[{name_of(slot)}] is {type(node).__name__}, which is a node for {node.slot}; "
            f"put it under its own slot or change its 'slot'"
        )
    return node


def check_handoffs(nodes: Mapping[SlotKey, ScheduleNode]) -> None:
    """Each handoff is written by one slot and read by one later slot."""
    writers: dict[str, ScheduleNode] = {}
    readers: dict[str, ScheduleNode] = {}
    for node in nodes.values():
        for name in node._reads:
            if name not in writers:
                _refuse_forgotten(nodes.values(), name, "writes", "reads")
                raise PlanError(
                    f"{type(node).__name__} reads {name!r}, which no earlier slot of this layer writes; "
                    f"let an earlier node declare it in 'writes' and put it "
                    f"(written so far: {', '.join(sorted(writers)) or 'nothing'})"
                )
            if name in readers:
                raise PlanError(
                    f"{type(node).__name__} and {type(readers[name]).__name__} both read {name!r}; a handoff is taken "
                    f"once: let the first write it on under a new name"
                )
            readers[name] = node
        for name in node._writes:
            if name in writers:
                raise PlanError(
                    f"{type(node).__name__} and {type(writers[name]).__name__} both write {name!r}; rename one of them"
                )
            writers[name] = node
    for name in sorted(writers.keys() - readers.keys()):
        _refuse_forgotten(nodes.values(), name, "reads", "writes")
        raise PlanError(
            f"{type(writers[name]).__name__} writes {name!r}, which no later slot of this layer reads; it would "
            f"never be freed: let a later node declare it in 'reads' and take it, or do not write it"
        )


def _refuse_forgotten(nodes: Collection[ScheduleNode], name: str, attribute: str, counterpart: str) -> None:
    """Raise PlanError where a node would have ``name`` among its ``reads`` or ``writes``, had its class, which declares
    them anew, kept those of its base."""
    wanted = {handoff for node in nodes for handoff in getattr(node, f"_{counterpart}")}
    there = {handoff for node in nodes for handoff in getattr(node, f"_{attribute}")}
    for node in nodes:
        declaring, *bases = [kind for kind in type(node).__mro__ if attribute in vars(kind)]
        own = vars(declaring)[attribute]
        base = next((kind for kind in bases if name in vars(kind)[attribute]), None)
        if base is None or name in own or declaring is CombineExchangeNode:  # leaves them to PostCombineNode
            continue
        missing = sorted((vars(base)[attribute].keys() - own.keys()) & wanted - there)
        others = "later slots read" if attribute == "writes" else "earlier slots write"
        raise PlanError(
            f"{declaring.__name__} declares {attribute!r} without those of its base {base.__name__}: "
            f"{', '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing, which {others}; declare "
            f"{attribute} = {{**{base.__name__}.{attribute}{''.join(f', {key!r}: ...' for key in own)}}}"
        )


def root_of(extra: ExtraSlot, among: Mapping[SlotKey, object]) -> Slot:
    """The layer's own slot that an extra slot follows, directly or behind others."""
    after: Slot | str = extra.after
    while not isinstance(after, Slot):
        found = next((key for key in among if isinstance(key, ExtraSlot) and key.name == after), None)
        if found is None:
            if after in tuple(Slot):
                return Slot(after)
            raise PlanError(f"extra slot {extra.name!r} follows {after!r}, which this plan does not have")
        after = found.after
    return after


def names_of(slots: Any) -> str:
    """How slots are written in code."""
    return ", ".join(map(name_of, slots))


def name_of(slot: SlotKey) -> str:
    """How a slot is written in code."""
    return f"Slot.{slot.name}" if isinstance(slot, Slot) else f"ExtraSlot({slot.name!r})"


def spelling(factory: object) -> str:
    """How a factory is written in code."""
    return factory.__name__ if isinstance(factory, type) else repr(factory)
