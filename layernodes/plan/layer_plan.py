"""The nodes of one layer: built once, checked, immutable, shared by all microbatches."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple, final

from torch.nn import Module

from layernodes._megatron.layer_kinds import LayerKind, kind_of
from layernodes.errors import PlanError
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
from layernodes.plan.describe import LayerDescription, describe_layer
from layernodes.slots import Slot

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

    __slots__ = ("_kind", "layer", "nodes")

    layer: Module
    nodes: Mapping[Slot, ScheduleNode]

    def __init__(self, layer: Module, nodes: Mapping[Slot, ScheduleNode], kind: LayerKind) -> None:
        object.__setattr__(self, "layer", layer)
        object.__setattr__(self, "nodes", MappingProxyType(dict(nodes)))
        object.__setattr__(self, "_kind", kind)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"LayerPlan is immutable; build another plan instead of setting {name!r}")

    @staticmethod
    def build(
        layer: Module, *, nodes: Mapping[Slot, NodeFactory] | None = None, split_combine: bool = False
    ) -> LayerPlan:
        """Build the plan of a layer.

        Args:
            layer: a Megatron-Core ``TransformerLayer`` (dense or MoE) or ``MultiTokenPredictionLayer``; or any module,
                and then ``nodes`` names every slot that it uses.
            nodes: node class or factory (called with the layer) by slot, in place of the layer's own.
            split_combine: put everything after the combine exchange into a slot of its own, ``Slot.POST_COMBINE``.

        Raises:
            UnsupportedLayerError: a layer or configuration that is not handled; names field and value.
            PlanError: a slot that the layer does not have, a node for another slot, a handoff read that no earlier slot
                writes, or a layer that is not Megatron-Core's without nodes.
        """
        given = dict(nodes or {})
        kind = kind_of(layer, has_nodes=bool(given))
        factories: dict[Slot, NodeFactory] = {**_factories(kind, split_combine)}
        for slot, factory in given.items():
            if not isinstance(slot, Slot):
                raise PlanError(f"nodes has the key {slot!r}; use a Slot, one of {_names(Slot)}")
            if kind is not LayerKind.OTHER and slot not in factories:
                raise PlanError(
                    f"{type(layer).__name__} ({kind.value}) has no slot {slot.value!r} to put "
                    f"{_spelling(factory)} into; "
                    f"its slots are {_names(factories)}"
                )
            factories[slot] = factory
        built = {slot: _build_node(factories[slot], slot, layer) for slot in Slot if slot in factories}
        _check_handoffs(built)
        return LayerPlan(layer, built, kind)

    @property
    def is_moe(self) -> bool:
        """Whether tokens are dispatched to experts: whether the plan has a dispatch slot."""
        return Slot.MOE_DISPATCH in self.nodes

    @property
    def forward_funcs(self) -> ForwardFuncs:
        """The five callables that Megatron-Core's schedule plan expects.

        Those of dispatch and combine exist for a dense layer too, and raise NotImplementedError when called, as
        Megatron-Core's do. ``post_combine`` is fused into ``moe_combine``.
        """
        return ForwardFuncs(
            pre_dispatch_computation=self._required_func(Slot.PRE_DISPATCH_COMPUTATION),
            moe_dispatch=self._required_func(Slot.MOE_DISPATCH),
            mlp=self._required_func(Slot.MLP),
            moe_combine=self._required_func(Slot.MOE_COMBINE),
            mtp_post_process=self.nodes.get(Slot.MTP_POST_PROCESS),
        )

    @property
    def backward_dw(self) -> dict[str, Any]:
        """The deferred weight gradients of one microbatch: a fresh dict of hooks, one object or a list for each slot.

        Megatron-Core drains ``pre_dispatch_computation`` and ``mlp`` only, so hooks of later slots are appended to
        ``mlp``.
        """
        drained: dict[Slot, list[WgradHook]] = {Slot.PRE_DISPATCH_COMPUTATION: [], Slot.MLP: []}
        for slot, node in self.nodes.items():
            hook = node.wgrad_hook()
            if hook is not None:
                drained[slot if slot in drained else Slot.MLP].append(hook)
        return {slot.value: hooks[0] if len(hooks) == 1 else hooks for slot, hooks in drained.items()}

    def callables(self) -> tuple[ForwardFuncs, dict[str, Any]]:
        """``(forward_funcs, backward_dw)``, what Megatron-Core's ``build_layer_callables`` returns."""
        return self.forward_funcs, self.backward_dw

    def describe(self) -> LayerDescription:
        """What each slot does, as a pydantic model that dumps to JSON."""
        return describe_layer(self.layer, self.nodes)

    def __repr__(self) -> str:
        inside = ", ".join(f"{slot.value}={type(node).__name__}" for slot, node in self.nodes.items())
        return f"LayerPlan({type(self.layer).__name__}: {inside})"

    def _required_func(self, slot: Slot) -> Callable[..., Any]:
        node = self.nodes.get(slot)
        if node is None:
            return _not_implemented(slot, self.layer)
        if slot is Slot.MOE_COMBINE and Slot.POST_COMBINE in self.nodes:
            return _fused(node, self.nodes[Slot.POST_COMBINE])
        return node


def _factories(kind: LayerKind, split_combine: bool) -> dict[Slot, NodeFactory]:
    if kind is LayerKind.OTHER:
        return {}
    factories: dict[Slot, NodeFactory] = {Slot.PRE_DISPATCH_COMPUTATION: PreDispatchNode, Slot.MLP: ExpertNode}
    if kind.is_moe:
        factories[Slot.MOE_DISPATCH] = DispatchNode
        factories[Slot.MOE_COMBINE] = CombineExchangeNode if split_combine else CombineNode
        if split_combine:
            factories[Slot.POST_COMBINE] = PostCombineNode
    if kind.is_mtp:
        factories[Slot.MTP_POST_PROCESS] = MTPPostNode
    return factories


def _build_node(factory: NodeFactory, slot: Slot, layer: Module) -> ScheduleNode:
    if not callable(factory):
        raise PlanError(f"nodes[Slot.{slot.name}] is {factory!r}; give a node class or a callable that takes the layer")
    node = factory(layer)
    if not isinstance(node, ScheduleNode):
        raise PlanError(
            f"nodes[Slot.{slot.name}] made {node!r} for {type(layer).__name__}; it must return a ScheduleNode"
        )
    if node.slot != slot:
        raise PlanError(
            f"nodes[Slot.{slot.name}] is {type(node).__name__}, which is a node for {node.slot}; "
            f"put it under its own slot or change its 'slot'"
        )
    return node


def _check_handoffs(nodes: Mapping[Slot, ScheduleNode]) -> None:
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
        raise NotImplementedError(f"this {type(layer).__name__} has no {slot.value}; a dense layer skips it")

    return raise_not_implemented


def _fused(first: ScheduleNode, second: ScheduleNode) -> Callable[..., Any]:
    def run_both(ctx: Any, *inputs: Any) -> Any:
        outputs = first(ctx, *inputs)
        return second(ctx, *(outputs if isinstance(outputs, tuple) else (outputs,)))

    return run_both


def _names(slots: Any) -> str:
    return ", ".join(f"Slot.{slot.name}" for slot in slots)


def _spelling(factory: object) -> str:
    return factory.__name__ if isinstance(factory, type) else repr(factory)
