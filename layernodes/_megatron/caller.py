"""Who calls a node: Megatron-Core's own node class, which frees inputs by slot name, or one that asks for proof."""

from __future__ import annotations

from typing import Final

from megatron.core.models.common.utils import TransformerLayerNode, should_free_input
from megatron.core.transformer.transformer_config import TransformerConfig

from layernodes._megatron.plan_nodes import ProvingLayerNode
from layernodes.slots import Slot
from layernodes.state import NodeContext

_NEXT: Final = {
    Slot.PRE_DISPATCH_COMPUTATION: Slot.MOE_DISPATCH,
    Slot.MOE_DISPATCH: Slot.MLP,
    Slot.MLP: Slot.MOE_COMBINE,
}


def caller_frees_input(ctx: NodeContext) -> bool:
    """Whether the caller empties the storage of this slot's inputs once the node has returned, whoever uses it."""
    return isinstance(ctx, TransformerLayerNode) and bool(ctx.free_input)


def caller_frees_output(ctx: NodeContext) -> bool:
    """Whether the caller of the next slot may empty the storage of this slot's outputs, whoever uses it."""
    return isinstance(ctx, TransformerLayerNode) and not isinstance(ctx, ProvingLayerNode) and ctx.name in _NEXT


def frees_input_by_name(slot: Slot, config: TransformerConfig, num_local_experts: int | None) -> bool:
    """Whether Megatron-Core's own node class frees the input of ``slot`` (``should_free_input``)."""
    return bool(should_free_input(slot.value, num_local_experts is not None, config, num_local_experts))


def frees_output_by_name(slot: Slot, config: TransformerConfig, num_local_experts: int | None) -> bool:
    """Whether Megatron-Core's own node class frees what ``slot`` returned, as the input of the next slot."""
    following = _NEXT.get(slot)
    return following is not None and frees_input_by_name(following, config, num_local_experts)
