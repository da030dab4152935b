"""Shared experts that Megatron-Core's dispatcher overlaps with its exchange (``moe_shared_expert_overlap``)."""

from __future__ import annotations

from typing import Any

from megatron.core.transformer.moe.moe_layer import MoELayer
from torch import Tensor


def run_overlapped_shared_experts(moe: MoELayer, tokens: Tensor) -> Tensor:
    """Run the shared experts that the dispatcher would overlap with its exchange, all in this slot.

    The dispatcher would begin them in one slot and end them in another, through attributes, and their graph would cross
    the slots. The pieces and their order are the dispatcher's own, so the bits are.
    """
    dispatcher = moe.token_dispatcher
    shared = dispatcher.shared_experts
    in_dispatch = moe.config.moe_token_dispatcher_type == "flex"
    if in_dispatch:
        shared.pre_forward_comm(tokens, wait_current_stream=True)
    shared.linear_fc1_forward_and_act()
    if in_dispatch:
        _run_backward_after_gate(shared, tokens)
    shared.linear_fc2_forward()
    shared.post_forward_comm()
    output: Tensor = shared.get_output()
    dispatcher.shared_experts = None
    return output.view(dispatcher.hidden_shape)


def _run_backward_after_gate(shared: Any, tokens: Tensor) -> None:
    """Let the gate's gradient reach the tokens before that of fc1, which the flex dispatcher ranks behind its own."""
    hidden = shared.cached_fc2_input
    if (
        shared.gate_score is not None
        and hidden is not None
        and hidden.grad_fn is not None
        and tokens.grad_fn is not None
    ):
        hidden.grad_fn._set_sequence_nr(tokens.grad_fn._sequence_nr())
