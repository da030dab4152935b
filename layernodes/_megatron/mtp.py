"""The ends of a multi-token-prediction layer, around the slots of its inner layer.

Mirrors ``MultiTokenPredictionBlock.forward`` and ``MultiTokenPredictionLayer.forward`` of megatron-core 0.19. Between
the layers of a block the hidden states of all depths travel as one tensor, ``[(1 + depth) * s, b, h]``, which is what
the block returns in the end: no tensor reaches a layer by another way.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionLayer, get_mtp_layer_offset
from megatron.core.utils import make_viewless_tensor
from torch import Tensor
from torch.nn import Module

from layernodes._megatron.calls import ModuleCall
from layernodes._megatron.chunk_state import MTPChain, progress_of
from layernodes._megatron.decoder import calls_of, end_decoder
from layernodes.state import NodeContext


class MTPEntry(NamedTuple):
    """What entering an MTP layer gives.

    Attributes:
        earlier: the hidden states of the depths before the latest, ``[depth * s, b, h]``; None for none.
        latest: those of the latest depth, ``[s, b, h]``, to be handed on.
        hidden: the same, for the layer to work on.
        decoder_input: the embeddings of the next tokens, ``[s, b, h]``.
        call: the layer's call in progress, where hooks listen.
    """

    earlier: Tensor | None
    latest: Tensor
    hidden: Tensor
    decoder_input: Tensor
    call: ModuleCall | None


def enter(ctx: NodeContext, layer: MultiTokenPredictionLayer, depths: Tensor) -> MTPEntry:
    """Roll the tokens, embed them and pick the hidden states of the depth before.

    What is handed on is the very tensor that the layer works on, so that its gradient from behind the layer is the
    first of those that autograd adds up there, as in the plain block: (a + b) + c, not a + (b + c).

    Args:
        ctx: the microbatch.
        layer: the MTP layer.
        depths: the hidden states of all depths so far, ``[(1 + depth) * s, b, h]``.
    """
    chunk: Any = ctx.chunk_state
    model = chunk.model
    progress = progress_of(chunk)
    chain = progress.mtp
    if chain is None:
        if len(model.decoder.layers) == 0:
            depths = end_decoder(chunk, depths)
        depths = _begin_block(ctx, depths)
        offset = get_mtp_layer_offset(layer.config, model.vp_stage)
        chain = progress.mtp = MTPChain(
            depth=offset,
            input_ids=chunk.input_ids,
            position_ids=chunk.position_ids,
            padding_mask=_padding_mask(chunk),
        )
        first = True
    else:
        first = False
    size = depths.shape[0] // (1 + chain.depth)
    *before, latest = torch.split(depths, [size * chain.depth, size] if chain.depth else [size])
    if not first:  # the plain block's is a tensor of its own there, so that its uses add up at one node
        latest = make_viewless_tensor(inp=latest, requires_grad=True, keep_graph=True)
    hidden = latest
    if first and layer.config.mtp_detach_heads:
        hidden = hidden.detach()
    arguments = _layer_arguments(chunk, chain, hidden)
    call, arguments = ModuleCall.begin(layer, (), arguments)
    embedded = layer._get_embeddings(
        input_ids=arguments["input_ids"],
        position_ids=arguments["position_ids"],
        embedding=arguments["embedding"],
        hidden_states=arguments["hidden_states"],
        packed_seq_params=arguments["packed_seq_params"],
        padding_mask=arguments["padding_mask"],
    )
    chain.input_ids, chain.position_ids, chain.padding_mask, decoder_input, hidden = embedded
    chain.depth += 1
    return MTPEntry(before[0] if before else None, latest, hidden, decoder_input, call)


def join(layer: MultiTokenPredictionLayer, entry: MTPEntry) -> Tensor:
    """Normalize, concatenate and project hidden states and embeddings; runs under the layer's RNG fork."""
    joined: Tensor = layer._concat_embeddings(entry.hidden, entry.decoder_input)
    return joined


def begin_stack(ctx: NodeContext, layer: MultiTokenPredictionLayer, hidden: Tensor) -> Tensor:
    """Begin the call of the stack inside an MTP layer, for its hooks."""
    chunk: Any = ctx.chunk_state
    progress = progress_of(chunk)
    chain = progress.mtp
    assert chain is not None
    arguments = {
        "hidden_states": hidden,
        "attention_mask": chunk.attention_mask,
        "padding_mask": chain.padding_mask,
        "rotary_pos_emb": chunk.rotary_pos_emb,
        "inference_context": None,
        "packed_seq_params": chunk.packed_seq_params,
    }
    progress.stack_call, arguments = ModuleCall.begin(layer.mtp_model_layer, (), arguments)
    hidden = arguments["hidden_states"]
    return hidden


def end_stack(ctx: NodeContext, hidden: Tensor) -> Tensor:
    """End the call of the stack inside an MTP layer."""
    progress = progress_of(ctx.chunk_state)
    call, progress.stack_call = progress.stack_call, None
    if call is not None:
        hidden = call.end(hidden)
    return hidden


def modules_before_stack(layer: MultiTokenPredictionLayer) -> tuple[Module, ...]:
    """The modules of an MTP layer that run before its inner layer."""
    return tuple(c for name, c in layer.named_children() if name not in ("mtp_model_layer", "final_layernorm"))


def leave(
    ctx: NodeContext,
    layer: MultiTokenPredictionLayer,
    call: ModuleCall | None,
    hidden: Tensor,
    earlier: Tensor | None,
    latest: Tensor,
) -> Tensor:
    """Normalize the inner layer's output and append it to the depths; ends the block after its last layer."""
    chunk: Any = ctx.chunk_state
    progress = progress_of(chunk)
    chain = progress.mtp
    assert chain is not None
    hidden = layer._postprocess(hidden)
    if call is not None:
        hidden = call.end((hidden, chain.input_ids, chain.position_ids, chain.padding_mask))[0]
    depths = torch.cat([latest, hidden] if earlier is None else [earlier, latest, hidden], dim=0)
    if ctx.is_last_layer:
        progress.mtp = None
        if progress.mtp_call is not None:
            depths = progress.mtp_call.end(depths)
            progress.mtp_call = None
    return depths


def _begin_block(ctx: NodeContext, hidden: Tensor) -> Tensor:
    chunk: Any = ctx.chunk_state
    arguments = {
        "input_ids": chunk.input_ids,
        "position_ids": chunk.position_ids,
        "hidden_states": hidden,
        "attention_mask": chunk.attention_mask,
        "inference_params": None,
        **_shared_arguments(chunk),
        "padding_mask": _padding_mask(chunk),
        "embedding": chunk.model.embedding,
        **(chunk.extra_block_kwargs or {}),
    }
    left_out = calls_of(chunk).mtp_left_out
    arguments = {name: value for name, value in arguments.items() if name not in left_out}
    progress = progress_of(chunk)
    progress.mtp_call, arguments = ModuleCall.begin(chunk.model.mtp, (), arguments)
    hidden = arguments["hidden_states"]
    return hidden


def _layer_arguments(chunk: Any, chain: MTPChain, hidden: Tensor) -> dict[str, Any]:
    return {
        "input_ids": chain.input_ids,
        "position_ids": chain.position_ids,
        "hidden_states": hidden,
        "attention_mask": chunk.attention_mask,
        "padding_mask": chain.padding_mask,
        "inference_params": None,
        **_shared_arguments(chunk),
        "embedding": chunk.model.embedding,
    }


def _shared_arguments(chunk: Any) -> dict[str, Any]:
    return {
        "rotary_pos_emb": chunk.rotary_pos_emb,
        "rotary_pos_cos": chunk.rotary_pos_cos,
        "rotary_pos_sin": chunk.rotary_pos_sin,
        "packed_seq_params": chunk.packed_seq_params,
        "sequence_len_offset": chunk.sequence_len_offset,
    }


def _padding_mask(chunk: Any) -> Tensor | None:
    mask: Tensor | None = chunk.padding_mask
    return None if "padding_mask" in calls_of(chunk).mtp_left_out else mask
