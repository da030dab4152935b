"""The nodes of one layer: built once, checked, immutable, shared by all microbatches."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from enum import StrEnum
from types import MappingProxyType
from typing import Any, NamedTuple, final

from torch.nn import Module

from layernodes._megatron.caller import caller_frees_input, caller_frees_output
from layernodes._megatron.layer_kinds import LayerKind, kind_of
from layernodes._megatron.support import notes_on
from layernodes._megatron.wgrad import delays_wgrads
from layernodes.errors import PlanError, UnsupportedLayerError
from layernodes.nodes import (
    CombineExchangeNode,
    CombineNode,
    DispatchNode,
    ExpertNode,
    MTPPostNode,
    PostCombineNode,
    PreDispatchNode,
    ScheduleNode,
    WgradHook,
)
from layernodes.nodes.base import copied, owned
from layernodes.plan.describe import LayerDescription, describe_layer
from layernodes.slots import MEGATRON_SLOTS, ExtraSlot, Slot
from layernodes.state import FusedContext


class WgradMode(StrEnum):
    """Whether weight gradients are deferred: ``auto``, wherever a node can, or ``off``."""

    AUTO = "auto"
    OFF = "off"


_logger = logging.getLogger(__name__)

SlotKey = Slot | ExtraSlot
"""What a plan's nodes are filed under."""

NodeFactory = Callable[[Any], ScheduleNode]
"""A node class, or any callable that takes the layer and returns a node for it."""


class ForwardFuncs(NamedTuple):
    """Megatron-Core's five callables of a layer, in slot order; each is called ``f(node, *tensors)``."""

    pre_dispatch_computation: Callable[..., Any]
    moe_dispatch: Callable[..., Any]
    mlp: Callable[..., Any]
    moe_combine: Callable[..., Any]
    mtp_post_process: Callable[..., Any] | None


@final
class LayerPlan:
    """The nodes of one layer.

    Build with ``LayerPlan.build``. Attributes are read-only.

    Attributes:
        layer: the layer that the nodes run.
        nodes: node by slot, in slot order; slots that the layer does not have are absent.
    """

    __slots__ = ("_built_from", "_kind", "layer", "nodes")

    layer: Module
    nodes: Mapping[SlotKey, ScheduleNode]

    _built_from: tuple[Mapping[SlotKey, NodeFactory], bool]
    _kind: LayerKind

    def __init__(
        self,
        layer: Module,
        nodes: Mapping[SlotKey, ScheduleNode],
        kind: LayerKind,
        built_from: tuple[Mapping[SlotKey, NodeFactory], bool],
    ) -> None:
        object.__setattr__(self, "layer", layer)
        object.__setattr__(self, "nodes", MappingProxyType(dict(nodes)))
        object.__setattr__(self, "_kind", kind)
        object.__setattr__(self, "_built_from", built_from)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"LayerPlan is immutable; build another plan instead of setting {name!r}")

    @staticmethod
    def build(
        layer: Module,
        *,
        nodes: Mapping[SlotKey, NodeFactory] | None = None,
        split_combine: bool = False,
        wgrad: WgradMode | str = WgradMode.OFF,
    ) -> LayerPlan:
        """Build the plan of a layer.

        Args:
            layer: a Megatron-Core ``TransformerLayer`` (dense or MoE) or ``MultiTokenPredictionLayer``; or any module,
                and then ``nodes`` names every slot that it uses.
            nodes: node class or factory (called with the layer) by slot, in place of the layer's own.
            split_combine: put everything after the combine exchange into a slot of its own, ``Slot.POST_COMBINE``.
            wgrad: ``"auto"`` defers weight gradients wherever a node can, and its slot then has ``W`` steps; ``"off"``:
                all come with ``B``.

        Raises:
            UnsupportedLayerError: a layer or configuration that is not handled; names field and value.
            PlanError: a slot that the layer does not have, a node for another slot, a handoff read that no earlier slot
                writes, or a layer that is not Megatron-Core's without nodes.
        """
        given = dict(nodes or {})
        kind = kind_of(layer, has_nodes=bool(given))
        factories: dict[SlotKey, NodeFactory] = {**_factories(kind, split_combine)}
        for slot, factory in given.items():
            if not isinstance(slot, Slot | ExtraSlot):
                raise PlanError(f"nodes has the key {slot!r}; use a Slot, one of {_names(Slot)}, or an ExtraSlot")
            if kind is not LayerKind.OTHER and isinstance(slot, Slot) and slot not in factories:
                raise PlanError(
                    f"{type(layer).__name__} ({kind.value}) has no slot {slot.value!r} to put "
                    f"{_spelling(factory)} into; "
                    f"its slots are {_names(factories)}"
                )
            factories[slot] = factory
        built = {slot: _build_node(factories[slot], slot, layer) for slot in _in_order(factories)}
        _check_handoffs(built)
        mode = WgradMode(wgrad)
        for slot, node in built.items():
            if mode is WgradMode.AUTO:
                node.defer_wgrads()
            elif kind is not LayerKind.OTHER and delays_wgrads(layer) and node.own_deferred_parameters():
                raise UnsupportedLayerError(
                    f"{_name(slot)} has modules that hold their weight gradients back (delay_wgrad_compute is on), and "
                    f"wgrad='off' would never compute them; build with wgrad='auto', or switch delay_wgrad_compute off",
                    field="delay_wgrad_compute",
                    value=True,
                )
        if kind is not LayerKind.OTHER:
            for note in notes_on(layer):
                _logger.warning("%s: %s", type(layer).__name__, note)
        return LayerPlan(layer, built, kind, (given, split_combine))

    def with_wgrad(self, wgrad: WgradMode | str) -> LayerPlan:
        """The plan of the same layer and nodes, built anew with another ``wgrad``."""
        nodes, split_combine = self._built_from
        return LayerPlan.build(self.layer, nodes=nodes, split_combine=split_combine, wgrad=wgrad)

    @staticmethod
    def has_slot(layer: Module, slot: SlotKey, split_combine: bool = False) -> bool:
        """Whether a plan of ``layer`` can have a node at ``slot``; an extra slot fits every layer."""
        return isinstance(slot, ExtraSlot) or slot in _factories(kind_of(layer, has_nodes=False), split_combine)

    def root_of(self, extra: ExtraSlot) -> Slot:
        """The layer's own slot that an extra slot follows, directly or behind other extra slots."""
        return _root_of(extra, self.nodes)

    @property
    def is_moe(self) -> bool:
        """Whether tokens are dispatched to experts: whether the plan has a dispatch slot."""
        return Slot.MOE_DISPATCH in self.nodes

    @property
    def forward_funcs(self) -> ForwardFuncs:
        """The five callables that Megatron-Core's schedule plan expects.

        Those of dispatch and combine exist for a dense layer too, which has neither: called by mistake, they raise, as
        Megatron-Core's do, by the same type, which its callers may catch.
        ``post_combine`` is fused into ``moe_combine``.
        """
        own: dict[Slot, list[ScheduleNode]] = {}
        current = Slot.PRE_DISPATCH_COMPUTATION
        for slot, node in self.nodes.items():
            if isinstance(slot, Slot) and slot is not Slot.POST_COMBINE:
                current = slot
            own.setdefault(current, []).append(node)
        callables = {slot: nodes[0] if len(nodes) == 1 else _Fused(nodes) for slot, nodes in own.items()}
        required = {
            slot.value: callables.get(slot) or _not_implemented(slot, self.layer)
            for slot in MEGATRON_SLOTS
            if slot is not Slot.MTP_POST_PROCESS
        }
        return ForwardFuncs(**required, mtp_post_process=callables.get(Slot.MTP_POST_PROCESS))

    @property
    def backward_dw(self) -> dict[str, Any]:
        """The deferred weight gradients of one microbatch: a fresh dict of hooks, one object or a list for each slot.

        Megatron-Core drains ``pre_dispatch_computation`` and ``mlp`` only, so hooks of later slots are appended to
        ``mlp``.
        """
        drained: dict[Slot, list[WgradHook]] = {Slot.PRE_DISPATCH_COMPUTATION: [], Slot.MLP: []}
        for slot, node in self.nodes.items():
            hook = node.new_hook()
            if hook is not None:
                drained[slot if isinstance(slot, Slot) and slot in drained else Slot.MLP].append(hook)
        return {slot.value: hooks[0] if len(hooks) == 1 else hooks for slot, hooks in drained.items()}

    def callables(self) -> tuple[ForwardFuncs, dict[str, Any]]:
        """``(forward_funcs, backward_dw)``, what Megatron-Core's ``build_layer_callables`` returns."""
        return self.forward_funcs, self.backward_dw

    def describe(self) -> LayerDescription:
        """What each slot does, as a pydantic model that dumps to JSON."""
        notes = () if self._kind is LayerKind.OTHER else notes_on(self.layer)
        return describe_layer(self.layer, self.nodes, notes)

    def __repr__(self) -> str:
        inside = ", ".join(f"{slot.name.lower()}={type(node).__name__}" for slot, node in self.nodes.items())
        return f"LayerPlan({type(self.layer).__name__}: {inside})"


def _factories(kind: LayerKind, split_combine: bool) -> dict[SlotKey, NodeFactory]:
    if kind is LayerKind.OTHER:
        return {}
    factories: dict[SlotKey, NodeFactory] = {Slot.PRE_DISPATCH_COMPUTATION: PreDispatchNode, Slot.MLP: ExpertNode}
    if kind.is_moe:
        factories[Slot.MOE_DISPATCH] = DispatchNode
        factories[Slot.MOE_COMBINE] = CombineExchangeNode if split_combine else CombineNode
        if split_combine:
            factories[Slot.POST_COMBINE] = PostCombineNode
    if kind.is_mtp:
        factories[Slot.MTP_POST_PROCESS] = MTPPostNode
    return factories


def _build_node(factory: NodeFactory, slot: SlotKey, layer: Module) -> ScheduleNode:
    if not callable(factory):
        raise PlanError(f"nodes[{_name(slot)}] is {factory!r}; give a node class or a callable that takes the layer")
    node = factory(layer)
    if not isinstance(node, ScheduleNode):
        raise PlanError(f"nodes[{_name(slot)}] made {node!r} for {type(layer).__name__}; it must return a ScheduleNode")
    if node.slot != slot:
        raise PlanError(
            f"nodes[{_name(slot)}] is {type(node).__name__}, which is a node for {node.slot}; "
            f"put it under its own slot or change its 'slot'"
        )
    return node


def _check_handoffs(nodes: Mapping[SlotKey, ScheduleNode]) -> None:
    """Each handoff is written by one slot and read by one later slot."""
    writers: dict[str, ScheduleNode] = {}
    readers: dict[str, ScheduleNode] = {}
    for node in nodes.values():
        for name in node._reads:
            if name not in writers:
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
    for name in writers.keys() - readers.keys():
        raise PlanError(
            f"{type(writers[name]).__name__} writes {name!r}, which no later slot of this layer reads; it would "
            f"never be "
            f"freed: let a later node declare it in 'reads' and take it, or do not write it"
        )


def _not_implemented(slot: Slot, layer: Module) -> Callable[..., Any]:
    def raise_not_implemented(*_: object) -> None:
        # The type that Megatron-Core's callables of a dense layer raise: part of the contract, not work left undone.
        raise NotImplementedError(f"this {type(layer).__name__} has no {slot.value}; a dense layer skips it")

    return raise_not_implemented


class _Fused:
    """Nodes that a caller runs as one: extra slots, and post-combine work, behind the slot that they follow."""

    def __init__(self, nodes: list[ScheduleNode]) -> None:
        written = {name for node in nodes for name in node._writes}
        self._nodes = nodes
        self._internal = frozenset(name for node in nodes for name in node._reads if name in written)
        self.wgrad_parameters = [p for node in nodes for p in node.wgrad_parameters]

    def __call__(self, ctx: Any, *inputs: Any) -> Any:
        if caller_frees_input(ctx) and any(node.keeps_input() for node in self._nodes):
            inputs = copied(inputs)
        for node in self._nodes:
            outputs = node(FusedContext(ctx, self._internal, is_first=node is self._nodes[0]), *inputs)
            inputs = outputs if isinstance(outputs, tuple) else (outputs,)
        return owned(outputs) if caller_frees_output(ctx) else outputs


def _root_of(extra: ExtraSlot, among: Mapping[SlotKey, object]) -> Slot:
    after: Slot | str = extra.after
    while not isinstance(after, Slot):
        found = next((key for key in among if isinstance(key, ExtraSlot) and key.name == after), None)
        if found is None:
            if after in tuple(Slot):
                return Slot(after)
            raise PlanError(f"extra slot {extra.name!r} follows {after!r}, which this plan does not have")
        after = found.after
    return after


def _in_order(factories: Mapping[SlotKey, NodeFactory]) -> list[SlotKey]:
    """The slots in forward order: each extra slot directly after the one that it follows."""
    order: list[SlotKey] = [slot for slot in Slot if slot in factories]
    extras = [key for key in factories if isinstance(key, ExtraSlot)]
    names = [key.name for key in extras]
    if len(set(names)) != len(names):
        raise PlanError(f"two extra slots share a name: {', '.join(names)}; give each a name of its own")
    rank = {slot: i for i, slot in enumerate(Slot)}
    for extra in extras:
        root = _root_of(extra, factories)
        at = sum(1 for key in order if rank[key if isinstance(key, Slot) else _root_of(key, factories)] <= rank[root])
        order.insert(at, extra)
    return order


def _names(slots: Any) -> str:
    return ", ".join(map(_name, slots))


def _name(slot: SlotKey) -> str:
    return f"Slot.{slot.name}" if isinstance(slot, Slot) else f"ExtraSlot({slot.name!r})"


def _spelling(factory: object) -> str:
    return factory.__name__ if isinstance(factory, type) else repr(factory)
