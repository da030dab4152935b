"""What the first slot of a multi-token-prediction layer hands to its last: the depths so far, and the layer's call."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from torch import Tensor

from layernodes._megatron.calls import ModuleCall
from layernodes._megatron.mtp import MTPEntry, enter, leave
from layernodes.nodes.base import ScheduleNode
from layernodes.state import HandoffMap, NodeContext

if TYPE_CHECKING:
    from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionLayer

MTP_HANDOFFS: Final[HandoffMap] = {
    "mtp_depths": Tensor | None,
    "mtp_latest": Tensor,
    "mtp_call": ModuleCall | None,
}
"""Written by the first slot, read by the last."""


def enter_layer(node: ScheduleNode, ctx: NodeContext, layer: MultiTokenPredictionLayer, depths: Tensor) -> MTPEntry:
    """Enter the layer, and put the handoffs."""
    entry = enter(ctx, layer, depths)
    node.put(ctx, "mtp_depths", entry.earlier)
    node.put(ctx, "mtp_latest", entry.latest)
    node.put(ctx, "mtp_call", entry.call)
    return entry


def leave_layer(node: ScheduleNode, ctx: NodeContext, layer: MultiTokenPredictionLayer, hidden: Tensor) -> Tensor:
    """Take the handoffs, and leave the layer with the hidden states of all depths."""
    depths = node.take(ctx, "mtp_depths")
    latest = node.take(ctx, "mtp_latest")
    call = node.take(ctx, "mtp_call")
    assert isinstance(depths, Tensor | None)
    assert isinstance(latest, Tensor)
    assert isinstance(call, ModuleCall | None)
    return leave(ctx, layer, call, hidden, depths, latest)
