"""The nodes of one layer: built once, checked, immutable, shared by all microbatches."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from enum import StrEnum
from types import MappingProxyType
from typing import Any, NamedTuple, NoReturn, final

from torch.nn import Module, ModuleList

from layernodes._megatron.layer_kinds import LayerKind, inner_layers, kind_of, precision_context
from layernodes._megatron.support import notes_on
from layernodes._megatron.wgrad import delays_wgrads
from layernodes.errors import PlanError, UnsupportedLayerError
from layernodes.nodes import ScheduleNode, WgradHook
from layernodes.nodes.group import group_nodes, is_grouped
from layernodes.plan.arguments import check_argument, refuse_option
from layernodes.plan.describe import LayerDescription, describe_layer, unheld_parameters
from layernodes.plan.forward_funcs import ForwardFuncs, forward_funcs
from layernodes.plan.registry import LayerRegistry, NodeFactory, SlotKey, registry_of
from layernodes.plan.slot_nodes import build_node, check_handoffs, factories_of, name_of, names_of, root_of, spelling
from layernodes.plan.slot_order import in_order
from layernodes.slots import ExtraSlot, Slot
from layernodes.wgrad import check_hook


class WgradMode(StrEnum):
    """Whether weight gradients are deferred: ``auto``, wherever a node can, or ``off``."""

    AUTO = "auto"
    OFF = "off"

    @classmethod
    def _missing_(cls, value: object) -> NoReturn:
        refuse_option("wgrad", value, cls)


_logger = logging.getLogger(__name__)


class _Recipe(NamedTuple):
    """What a plan was built from, beside its layer and ``wgrad``."""

    nodes: Mapping[SlotKey, NodeFactory]
    split_combine: bool
    registry: LayerRegistry


@final
class LayerPlan:
    """The nodes of one layer, or of several joined as one logical layer.

    Build with ``LayerPlan.build`` and ``LayerPlan.join``. Attributes are read-only.

    Attributes:
        layer: the layer that the nodes run; of joined layers, a ``ModuleList`` of them.
        nodes: node by slot, in slot order; slots that the layer does not have are absent.
        parts: the plans of the layers that are joined here, or that are inside an MTP layer over a stack; empty else.
    """

    __slots__ = ("_kind", "_recipe", "layer", "nodes", "parts")

    layer: Module
    nodes: Mapping[SlotKey, ScheduleNode]
    parts: tuple[LayerPlan, ...]

    _kind: LayerKind
    _recipe: _Recipe | None

    def __init__(
        self,
        layer: Module,
        nodes: Mapping[SlotKey, ScheduleNode],
        kind: LayerKind,
        recipe: _Recipe | None,
        parts: Sequence[LayerPlan] = (),
    ) -> None:
        object.__setattr__(self, "layer", layer)
        object.__setattr__(self, "nodes", MappingProxyType(dict(nodes)))
        object.__setattr__(self, "parts", tuple(parts))
        object.__setattr__(self, "_kind", kind)
        object.__setattr__(self, "_recipe", recipe)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"LayerPlan is immutable; build another plan instead of setting {name!r}")

    @staticmethod
    def build(
        layer: Module,
        *,
        nodes: Mapping[SlotKey, NodeFactory] | None = None,
        split_combine: bool = False,
        wgrad: WgradMode | str = WgradMode.OFF,
        registry: LayerRegistry | None = None,
    ) -> LayerPlan:
        """Build the plan of a layer.

        Args:
            layer: a Megatron-Core ``TransformerLayer`` (dense, MoE, attention alone, MLP alone),
                ``MultiTokenPredictionLayer`` or ``MambaLayer``; or any module, and then ``nodes`` or ``registry`` names
                every slot that it uses.
            nodes: node class or factory (called with the layer) by slot, in place of the layer's own.
            split_combine: put everything after the combine exchange into a slot of its own, ``Slot.POST_COMBINE``.
            wgrad: ``"auto"`` defers weight gradients wherever a node can, and its slot then has ``W`` steps; ``"off"``:
                all come with ``B``.
            registry: nodes of layer classes of your own.

        Raises:
            UnsupportedLayerError: a layer or configuration that is not handled; names field and value.
            PlanError: a slot that the layer does not have, a node for another slot, a handoff read that no earlier slot
                writes, a ``wgrad_hook()`` that returns no hook, or a layer that is not Megatron-Core's without nodes.
            NodeDefinitionError: a node class without ``forward``.
        """
        if nodes is not None:
            check_argument("nodes", nodes, Mapping)
        recipe = _Recipe(dict(nodes or {}), split_combine, registry_of(registry))
        mode = WgradMode(wgrad)
        registered = recipe.registry.find(layer)
        given = {**registered, **recipe.nodes}
        wrong = next((key for key in given if not isinstance(key, Slot | ExtraSlot)), None)
        if wrong is not None:
            raise PlanError(f"nodes has the key {wrong!r}; use a Slot, one of {names_of(Slot)}, or an ExtraSlot")
        kind = LayerKind.OTHER if registered else kind_of(layer, has_nodes=bool(given))
        if kind is LayerKind.MTP_STACK:
            return _build_stack(layer, recipe, mode)
        factories: dict[SlotKey, NodeFactory] = {**factories_of(kind, split_combine)}
        for slot, factory in given.items():
            if kind is not LayerKind.OTHER and isinstance(slot, Slot) and slot not in factories:
                raise PlanError(
                    f"{type(layer).__name__} ({kind.value}) has no slot {slot.value!r} to put "
                    f"{spelling(factory)} into; its slots are {names_of(factories)}"
                )
            factories[slot] = factory
        order = in_order(Slot, [key for key in factories if isinstance(key, ExtraSlot)])
        built = {slot: build_node(factories[slot], slot, layer) for slot in order if slot in factories}
        check_handoffs(built)
        for slot, node in built.items():
            if mode is WgradMode.AUTO:
                check_hook(type(node).__name__, node.wgrad_hook())
                node.defer_wgrads()
            elif kind is not LayerKind.OTHER and delays_wgrads(layer) and node.own_deferred_parameters():
                raise UnsupportedLayerError(
                    f"{name_of(slot)} has modules that hold their weight gradients back (delay_wgrad_compute is on), "
                    f"and wgrad='off' would never compute them; build with wgrad='auto', or switch that off",
                    field="delay_wgrad_compute",
                    value=True,
                )
        notes = [] if kind is LayerKind.OTHER else [*notes_on(layer)]
        unheld = unheld_parameters(layer, built.values()) if mode is WgradMode.AUTO else []
        if unheld:
            notes.append(
                f"no node's modules() hold {', '.join(unheld)}, whose gradients therefore come with B and not with W; "
                f"let a node hold the module (self.layer = layer) and not its parameter alone, or override modules()"
            )
        for note in notes:
            _logger.warning("%s: %s", type(layer).__name__, note)
        return LayerPlan(layer, built, kind, recipe)

    @staticmethod
    def join(parts: Sequence[LayerPlan]) -> LayerPlan:
        """Join the plans of neighbouring layers as one logical layer: ``parts``, the last of which may be a MoE layer.

        All but the last run in ``pre_dispatch_computation``, so that a pair schedule puts the communication of one
        microbatch beside another's attention. One plan alone is returned as it is.

        Raises:
            PlanError: no plans, or one before the last has several slots.
        """
        check_argument("parts", parts, Sequence)
        for part in parts:
            check_argument("a part", part, LayerPlan)
        if len(parts) == 1:
            return parts[0]
        if not parts:
            raise PlanError("no layer plans to join; give at least one")
        nodes = group_nodes([(plan.layer, plan.nodes) for plan in parts])
        for node in nodes.values():
            if is_grouped(node) and any(n.wgrad_parameters for p in parts for n in p.nodes.values()):
                node.defer_wgrads()
        return LayerPlan(ModuleList(plan.layer for plan in parts), nodes, LayerKind.OTHER, None, parts)

    def with_wgrad(self, wgrad: WgradMode | str) -> LayerPlan:
        """The plan of the same layer and nodes, built anew with another ``wgrad``."""
        if self._recipe is None:
            return LayerPlan.join([plan.with_wgrad(wgrad) for plan in self.parts])
        return LayerPlan.build(self.layer, **self._recipe._asdict(), wgrad=wgrad)

    @staticmethod
    def has_slot(
        layer: Module, slot: SlotKey, split_combine: bool = False, registry: LayerRegistry | None = None
    ) -> bool:
        """Whether a plan of ``layer``, built with this ``split_combine`` and ``registry``, can have a node at ``slot``;
        an extra slot fits every layer."""
        if isinstance(slot, ExtraSlot):
            return True
        registered = registry_of(registry).find(layer)
        if registered:
            return slot in registered
        kind = kind_of(layer, has_nodes=False)
        if kind is LayerKind.MTP_STACK:
            return any(LayerPlan.has_slot(inner, slot, split_combine, registry) for inner in inner_layers(layer))
        return slot in factories_of(kind, split_combine)

    def precision(self, node: ScheduleNode) -> Callable[[], AbstractContextManager[Any]] | None:
        """What makes the low-precision context of a node's forward; None where there is none, or it enters its own."""
        if is_grouped(node):
            return None
        owner = next((plan for plan in self.parts if node in plan.nodes.values()), self)
        return precision_context(owner.layer)

    def root_of(self, extra: ExtraSlot) -> Slot:
        """The layer's own slot that an extra slot follows, directly or behind other extra slots."""
        return root_of(extra, self.nodes)

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
        return forward_funcs(self.nodes, self.layer)

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
        return describe_layer(self.layer, self.title, self.nodes, self._notes())

    def _notes(self) -> tuple[str, ...]:
        if self.parts:
            return tuple(dict.fromkeys(note for plan in self.parts for note in plan._notes()))
        return () if self._kind is LayerKind.OTHER else notes_on(self.layer)

    @property
    def title(self) -> str:
        """The class of the layer, or of each of the layers that are joined."""
        names = [plan.title for plan in self.parts]
        if not names:
            return type(self.layer).__name__
        joined = " + ".join(names)
        return joined if self._kind is LayerKind.OTHER else f"{type(self.layer).__name__}({joined})"

    def __repr__(self) -> str:
        inside = ", ".join(f"{slot.name.lower()}={type(node).__name__}" for slot, node in self.nodes.items())
        return f"LayerPlan({self.title}: {inside})"


def _build_stack(layer: Module, recipe: _Recipe, wgrad: WgradMode) -> LayerPlan:
    """The plan of a multi-token-prediction layer over a stack: one logical layer."""
    registry, split_combine = recipe.registry, recipe.split_combine
    lost = [slot for slot in recipe.nodes if not LayerPlan.has_slot(layer, slot, split_combine, registry)]
    if lost:
        raise PlanError(f"nodes names {names_of(lost)}, which no layer in this MTP layer has; leave it out")
    parts = []
    for inner in inner_layers(layer):
        fitting = {
            slot: node
            for slot, node in recipe.nodes.items()
            if LayerPlan.has_slot(inner, slot, split_combine, registry)
        }
        parts.append(LayerPlan.build(inner, nodes=fitting, split_combine=split_combine, wgrad=wgrad, registry=registry))
    nodes = group_nodes([(plan.layer, plan.nodes) for plan in parts], stack=layer)
    check_handoffs(nodes)
    for node in nodes.values():
        if wgrad is WgradMode.AUTO and is_grouped(node):
            node.defer_wgrads()
    return LayerPlan(layer, nodes, LayerKind.MTP_STACK, recipe, parts)
