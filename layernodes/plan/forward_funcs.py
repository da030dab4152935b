"""A layer's nodes as the five callables that Megatron-Core's schedule plan expects."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from torch.nn import Module, Parameter

from layernodes._megatron.caller import caller_frees_input, caller_frees_output
from layernodes.nodes import ScheduleNode
from layernodes.nodes.copies import copied, owned
from layernodes.slots import MEGATRON_SLOTS, ExtraSlot, Slot
from layernodes.state import FusedContext

_COMPUTE: Final = (Slot.PRE_DISPATCH_COMPUTATION, Slot.MLP)


class ForwardFuncs(NamedTuple):
    """Megatron-Core's five callables of a layer, in slot order.

    Each is called ``f(node, *tensors)``, where ``node`` is Megatron-Core's ``TransformerLayerNode`` or another
    ``NodeContext``, with what the slot before returned: a tensor or a tuple of tensors.

    Attributes:
        pre_dispatch_computation, moe_dispatch, mlp, moe_combine: the slots that every layer has. For a dense layer
            dispatch and combine raise ``NotImplementedError``, as Megatron-Core's do.
        mtp_post_process: of a multi-token-prediction layer; None of any other.
    """

    pre_dispatch_computation: Callable[..., Any]
    moe_dispatch: Callable[..., Any]
    mlp: Callable[..., Any]
    moe_combine: Callable[..., Any]
    mtp_post_process: Callable[..., Any] | None


def forward_funcs(nodes: Mapping[Slot | ExtraSlot, ScheduleNode], layer: Module) -> ForwardFuncs:
    """The callables of ``layer``; slots that are not Megatron-Core's are fused into the one before."""
    own: dict[Slot, list[ScheduleNode]] = {}
    current = Slot.PRE_DISPATCH_COMPUTATION
    for slot, node in nodes.items():
        if isinstance(slot, Slot) and slot is not Slot.POST_COMBINE:
            current = slot
        own.setdefault(current, []).append(node)
    callables = {slot: nodes[0] if len(nodes) == 1 else _Fused(nodes) for slot, nodes in own.items()}
    required = {
        slot.value: callables.get(slot) or (_passed_on if slot in _COMPUTE else _not_implemented(slot, layer))
        for slot in MEGATRON_SLOTS
        if slot is not Slot.MTP_POST_PROCESS
    }
    return ForwardFuncs(**required, mtp_post_process=callables.get(Slot.MTP_POST_PROCESS))


def _passed_on(_: object, *inputs: Any) -> Any:
    """What a slot that the layer does not have returns to a caller that runs it all the same."""
    return inputs[0] if len(inputs) == 1 else inputs


def _not_implemented(slot: Slot, layer: Module) -> Callable[..., Any]:
    def raise_not_implemented(*_: object) -> None:
        # The type that Megatron-Core's callables of a dense layer raise: part of the contract, not work left undone.
        raise NotImplementedError(f"this {type(layer).__name__} has no {slot.value}; a dense layer skips it")

    return raise_not_implemented


class _Fused:
    """Nodes that a caller runs as one: extra slots, and post-combine work, behind the slot that they follow."""

    def __init__(self, nodes: Sequence[ScheduleNode]) -> None:
        written = {name for node in nodes for name in node._writes}
        self._nodes = nodes
        self._internal = frozenset(name for node in nodes for name in node._reads if name in written)

    @property
    def wgrad_parameters(self) -> list[Parameter]:
        """The parameters whose gradients come with ``W``, as of now."""
        return [parameter for node in self._nodes for parameter in node.wgrad_parameters]

    def __call__(self, ctx: Any, *inputs: Any) -> Any:
        if caller_frees_input(ctx) and any(node.keeps_input() for node in self._nodes):
            inputs = copied(inputs)
        for node in self._nodes:
            outputs = node(FusedContext(ctx, self._internal, is_first=node is self._nodes[0]), *inputs)
            inputs = outputs if isinstance(outputs, tuple) else (outputs,)
        return owned(outputs) if caller_frees_output(ctx) else outputs
