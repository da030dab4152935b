"""Several layers as one logical layer: its first slot runs the layers before the one that communicates.

    M  *  E      pre_dispatch_computation = M, *, then that of E;  moe_dispatch, mlp, moe_combine = those of E
    M  *  -      pre_dispatch_computation = M, *;                  mlp = that of -

In a pair schedule the communication of E then lies beside another microbatch's mixer and attention, as in a layer that
has both. Inside a multi-token-prediction layer over a stack the same slots also enter and leave it, and layers behind
the one that communicates run in its last slot.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, final

from torch import Tensor
from torch.nn import Module, Parameter

from layernodes._megatron.decoder import layer_rng
from layernodes._megatron.deferral import deferrable_sites
from layernodes._megatron.layer_kinds import precision_context
from layernodes._megatron.mtp import begin_stack, end_stack, join, modules_before_stack
from layernodes._megatron.wgrad import ModulesHook, own_deferred_parameters
from layernodes.errors import PlanError, UnsupportedLayerError
from layernodes.nodes.base import ScheduleNode
from layernodes.nodes.mtp_handoffs import MTP_HANDOFFS, enter_layer, leave_layer
from layernodes.slots import ExtraSlot, Slot, StreamType
from layernodes.state import FusedContext, HandoffMap, NodeContext
from layernodes.wgrad import WgradHook

if TYPE_CHECKING:
    from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionLayer

Nodes = Mapping[Slot | ExtraSlot, ScheduleNode]
"""The nodes of one layer by slot."""


@final
@dataclass(frozen=True, kw_only=True)
class _Member:
    """One node of a group, with its layer's low-precision context and place in the group."""

    node: ScheduleNode
    precision: Callable[[], AbstractContextManager[Any]] | None
    is_first: bool
    is_last: bool

    def run(self, ctx: NodeContext, inputs: tuple[Tensor, ...]) -> Tensor | tuple[Tensor, ...]:
        """Run the node for its own layer: first and last of the decoder is one layer of a group at most."""
        if isinstance(ctx, FusedContext):  # the whole group is fused with a slot behind it
            inner = FusedContext(ctx.outer, ctx.internal, is_first=True)
        else:
            inner = FusedContext(ctx, frozenset(), is_first=True)
        inner.is_first_layer = ctx.is_first_layer and self.is_first
        inner.is_last_layer = ctx.is_last_layer and self.is_last
        with nullcontext() if self.precision is None else self.precision():
            return self.node.forward(inner, *inputs)


class _GroupNode(ScheduleNode):
    """Runs nodes of several layers one after the other, in one slot.

    What the nodes read and write beside hidden states, their modules and their deferred weight gradients are its own.
    """

    def __init__(self, members: Sequence[_Member]) -> None:
        self._members = tuple(members)
        self._reads = {**self._reads, **{k: v for m in members for k, v in m.node._reads.items()}}
        self._writes = {**self._writes, **{k: v for m in members for k, v in m.node._writes.items()}}

    def _run_members(self, ctx: NodeContext, inputs: tuple[Tensor, ...]) -> Tensor | tuple[Tensor, ...]:
        outputs: Tensor | tuple[Tensor, ...] = inputs
        for member in self._members:
            outputs = member.run(ctx, outputs if isinstance(outputs, tuple) else (outputs,))
        return outputs[0] if isinstance(outputs, tuple) and len(outputs) == 1 else outputs

    @property
    def members(self) -> tuple[ScheduleNode, ...]:
        """The nodes, in the order in which they run."""
        return tuple(member.node for member in self._members)

    def modules(self) -> tuple[Module, ...]:
        return tuple(module for node in self.members for module in node.modules())

    def deferred_parameters(self) -> tuple[Parameter, ...]:
        return tuple(parameter for node in self.members for parameter in node.deferred_parameters())

    def own_deferred_parameters(self) -> tuple[Parameter, ...]:
        return tuple(parameter for node in self.members for parameter in node.own_deferred_parameters())

    def touches_rng(self) -> bool:
        return any(node.touches_rng() for node in self.members)

    def wgrad_hook(self) -> WgradHook | None:
        hooks = [hook for node in self.members if (hook := node.wgrad_hook()) is not None]
        return ModulesHook(*hooks) if hooks else None


@final
class GroupedPreDispatchNode(_GroupNode):
    """The layers of a group before the one that communicates, then the latter's own first slot.

    ======= =====================================================================================================
    slot    ``pre_dispatch_computation``
    stream  compute
    input   hidden states ``[s, b, h]``
    output  what the last node returns: hidden states, or tokens and probs to dispatch
    writes  what its nodes write
    frees   nothing: the input is a residual
    wgrad   those of its nodes
    ======= =====================================================================================================
    """

    slot = Slot.PRE_DISPATCH_COMPUTATION
    stream = StreamType.COMPUTE

    def forward(self, ctx: NodeContext, *inputs: Tensor) -> Tensor | tuple[Tensor, ...]:
        return self._run_members(ctx, inputs)


class _StackNode(_GroupNode):
    """An end of a multi-token-prediction layer over a stack, with the layers that run there."""

    def __init__(self, layer: MultiTokenPredictionLayer, members: Sequence[_Member]) -> None:
        super().__init__(members)
        self._mtp: Any = layer


@final
class StackPreDispatchNode(_StackNode):
    """The first slot of a multi-token-prediction layer over a stack: enters it, then as ``GroupedPreDispatchNode``.

    ======= =====================================================================================================
    slot    ``pre_dispatch_computation``
    stream  compute
    input   the hidden states of all depths so far, ``[(1 + depth) * s, b, h]``
    output  what the last node returns: hidden states, or tokens and probs to dispatch
    writes  ``mtp_depths``, ``mtp_latest``, ``mtp_call``, and what its nodes write
    frees   nothing: the input is handed on
    wgrad   ``eh_proj``, and those of its nodes
    ======= =====================================================================================================
    """

    slot = Slot.PRE_DISPATCH_COMPUTATION
    stream = StreamType.COMPUTE
    writes: ClassVar[HandoffMap] = MTP_HANDOFFS

    def forward(self, ctx: NodeContext, *inputs: Tensor) -> Tensor | tuple[Tensor, ...]:
        (depths,) = inputs
        entry = enter_layer(self, ctx, self._mtp, depths)
        with layer_rng(ctx, self._mtp.config):
            hidden = join(self._mtp, entry)
        return self._run_members(ctx, (begin_stack(ctx, self._mtp, hidden),))

    def modules(self) -> tuple[Module, ...]:
        return (*modules_before_stack(self._mtp), *super().modules())

    def deferred_parameters(self) -> tuple[Parameter, ...]:
        own = deferrable_sites(modules_before_stack(self._mtp))
        return (*(site.parameter for site in own), *super().deferred_parameters())

    def own_deferred_parameters(self) -> tuple[Parameter, ...]:
        own = own_deferred_parameters(self._mtp.config, modules_before_stack(self._mtp))
        return (*own, *super().own_deferred_parameters())

    def wgrad_hook(self) -> WgradHook | None:
        inner = super().wgrad_hook()
        return ModulesHook(self._mtp.eh_proj, *([] if inner is None else [inner]))

    def touches_rng(self) -> bool:
        return bool(self._mtp.config.sequence_parallel) or super().touches_rng()


@final
class StackPostNode(_StackNode):
    """The last slot of a multi-token-prediction layer over a stack: the layers left, then the layer's own norm.

    ======= =====================================================================================================
    slot    ``mtp_post_process``
    stream  compute
    input   hidden states ``[s, b, h]``
    output  the hidden states of all depths so far, ``[(1 + depth) * s, b, h]``
    reads   ``mtp_depths``, ``mtp_latest``, ``mtp_call``
    frees   nothing
    wgrad   those of its nodes
    ======= =====================================================================================================
    """

    slot = Slot.MTP_POST_PROCESS
    stream = StreamType.COMPUTE
    reads: ClassVar[HandoffMap] = MTP_HANDOFFS

    def forward(self, ctx: NodeContext, *inputs: Tensor) -> Tensor | tuple[Tensor, ...]:
        hidden = self._run_members(ctx, inputs)
        assert isinstance(hidden, Tensor)
        return leave_layer(self, ctx, self._mtp, end_stack(ctx, hidden))

    def modules(self) -> tuple[Module, ...]:
        return (self._mtp.final_layernorm, *super().modules())


def group_nodes(
    parts: Sequence[tuple[Module, Nodes]], stack: MultiTokenPredictionLayer | None = None
) -> dict[Slot | ExtraSlot, ScheduleNode]:
    """The nodes of one logical layer made of several.

    Args:
        parts: the layers in forward order, each with its nodes.
        stack: the multi-token-prediction layer whose inner stack they are, if they are.

    Raises:
        PlanError: more than one of them has several slots, or one stands behind the one that has.
        UnsupportedLayerError: more than one, in a multi-token-prediction layer.
    """
    large = [i for i, (_, nodes) in enumerate(parts) if not _is_one_slot(nodes)]
    main = large[0] if large else len(parts) - 1
    if len(large) > 1 and stack is not None:
        raise UnsupportedLayerError(
            f"a multi-token-prediction layer with {len(large)} MoE layers in its stack is not handled: one logical "
            f"layer has one dispatch and one combine; give its pattern one E",
            field="mtp_layer_pattern",
            value=getattr(stack, "mtp_layer_pattern", None),
        )
    if len(large) > 1 or (stack is None and main < len(parts) - 1):
        names = " ".join(type(layer).__name__ for layer, _ in parts)
        wanted = "one layer with several slots" + ("" if stack is not None else ", as its last")
        raise PlanError(f"cannot join {names} as one logical layer: it may have {wanted}; group them otherwise")

    def members(first: int, end: int) -> list[_Member]:
        return [
            _Member(
                node=node,
                precision=precision_context(parts[i][0]),
                is_first=i == 0,
                is_last=i == len(parts) - 1,
            )
            for i in range(first, end)
            for node in parts[i][1].values()
        ]

    leading, trailing = members(0, main), members(main + 1, len(parts))
    own = dict(parts[main][1]) if parts else {}
    first = own.pop(Slot.PRE_DISPATCH_COMPUTATION, None)
    if first is not None:
        precision = precision_context(parts[main][0])
        leading.append(_Member(node=first, precision=precision, is_first=main == 0, is_last=main == len(parts) - 1))
    nodes: dict[Slot | ExtraSlot, ScheduleNode] = {}
    if stack is not None:
        nodes[Slot.PRE_DISPATCH_COMPUTATION] = StackPreDispatchNode(stack, leading)
        own[Slot.MTP_POST_PROCESS] = StackPostNode(stack, trailing)
    elif leading:
        nodes[Slot.PRE_DISPATCH_COMPUTATION] = GroupedPreDispatchNode(leading)
    return {**nodes, **own}


def is_small(nodes: Nodes) -> bool:
    """Whether a layer is computation in its first slot alone, as attention and mixers are: others end a group."""
    return _is_one_slot(nodes) and Slot.PRE_DISPATCH_COMPUTATION in nodes


def _is_one_slot(nodes: Nodes) -> bool:
    return len(nodes) == 1 and all(node.stream is StreamType.COMPUTE for node in nodes.values())


def is_grouped(node: ScheduleNode) -> bool:
    """Whether a node runs those of several layers, each under its own low-precision context."""
    return isinstance(node, _GroupNode)
