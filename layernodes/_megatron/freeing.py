"""Which slots still use their input or share their output, under a caller that frees storage by slot name.

Only Megatron-Core's own node class is such a caller. Under ours the holders of a storage are counted instead
(``layernodes.release``), and nothing here is asked.
"""

from __future__ import annotations

from layernodes._megatron.caller import frees_input_by_name, frees_output_by_name
from layernodes._megatron.layer import LayerParts
from layernodes.slots import Slot


def is_local_exchange(parts: LayerParts) -> bool:
    """Whether dispatch and combine move nothing, and so return their input."""
    assert parts.moe is not None
    dispatcher = parts.moe.token_dispatcher
    if parts.config.moe_token_dispatcher_type == "alltoall":
        return int(dispatcher.ep_size) == 1
    return int(dispatcher.tp_size) * int(dispatcher.ep_size) == 1


def experts_use_input(parts: LayerParts) -> bool:
    """Whether the experts' input is the dispatched storage itself: with drop-and-pad, or nothing to sort by expert."""
    if parts.moe is None or parts.config.moe_token_dispatcher_type != "alltoall":
        return False
    return bool(parts.config.moe_pad_expert_input_to_capacity) or parts.moe.num_local_experts == 1


def combine_uses_input(parts: LayerParts) -> bool:
    """Whether what follows combine works on the experts' output itself: nothing is exchanged and nothing
    un-permuted."""
    return parts.config.moe_token_dispatcher_type == "allgather" and is_local_exchange(parts)


def reasons_to_copy(parts: LayerParts, slot: Slot, keeps_input: bool) -> tuple[str, ...]:
    """Why the node of ``slot`` works on or hands on copies under Megatron-Core's own node class; for ``describe()``."""
    if parts.moe is None:
        return ()
    reasons = []
    if keeps_input and frees_input_by_name(slot, parts.config, parts.num_local_experts):
        reasons.append("input: freed by slot name while this node or autograd may still use it")
    if frees_output_by_name(slot, parts.config, parts.num_local_experts):
        if slot is Slot.PRE_DISPATCH_COMPUTATION and parts.config.moe_token_dispatcher_type == "allgather":
            reasons.append("output: a view of the norm's output, which the router saved")
        if slot is Slot.MOE_DISPATCH and is_local_exchange(parts):
            reasons.append("output: nothing is exchanged, so it shares the input's storage")
    freed = frees_input_by_name(slot, parts.config, parts.num_local_experts)
    if freed and slot is Slot.MOE_DISPATCH and is_local_exchange(parts) and not keeps_input:
        reasons.append("handoff dispatched_probs: nothing is exchanged, so it shares the storage of a freed input")
    return tuple(reasons)
