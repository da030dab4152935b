"""The ends of a multi-token-prediction layer, around the slots of its inner layer.

Mirrors ``MultiTokenPredictionBlock.forward`` and ``MultiTokenPredictionLayer.forward`` of megatron-core 0.19. Between
the layers of a block two tensors travel: the hidden states of the depths before, ``[depth * s, b, h]``, and those of
the latest, ``[s, b, h]``, which stay a tensor of their own: the plain model adds the gradients of all its uses one by
one, and so must the slot that uses it. The last layer returns all of them as one, ``[(1 + depth) * s, b, h]``, as the
block does. No tensor reaches a layer by another way.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionLayer, get_mtp_layer_offset
from torch import Tensor

from layernodes._megatron.calls import ModuleCall
from layernodes._megatron.chunk_state import MTPChain, progress_of
from layernodes._megatron.layer import end_decoder
from layernodes.state import NodeContext


class MTPEntry(NamedTuple):
    """What entering an MTP layer gives.

    Attributes:
        depths: the hidden states of the depths before, ``[depth * s, b, h]``; of the block's first layer, all of them.
        latest: those of the latest depth where they are not among ``depths``.
        hidden: what the layer makes of those of the latest depth, ``[s, b, h]``.
        decoder_input: the embeddings of the next tokens, ``[s, b, h]``.
        call: the layer's call in progress, where hooks listen.
    """

    depths: Tensor
    latest: Tensor | None
    hidden: Tensor
    decoder_input: Tensor
    call: ModuleCall | None


def enter(ctx: NodeContext, layer: MultiTokenPredictionLayer, depths: Tensor, latest: Tensor | None = None) -> MTPEntry:
    """Roll the tokens, embed them and pick the hidden states of the depth before; arguments as in ``MTPEntry``."""
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
            padding_mask=chunk.padding_mask,
        )
        hidden = torch.chunk(depths, 1 + offset, dim=0)[offset]
        if layer.config.mtp_detach_heads:
            hidden = hidden.detach()
    else:
        assert latest is not None
        hidden = latest
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
    return MTPEntry(depths, latest, hidden, decoder_input, call)


def join(layer: MultiTokenPredictionLayer, entry: MTPEntry) -> Tensor:
    """Normalize, concatenate and project hidden states and embeddings; runs under the layer's RNG fork."""
    joined: Tensor = layer._concat_embeddings(entry.hidden, entry.decoder_input)
    return joined


def leave(
    ctx: NodeContext,
    layer: MultiTokenPredictionLayer,
    call: ModuleCall | None,
    hidden: Tensor,
    depths: Tensor,
    latest: Tensor | None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Normalize the inner layer's output; it joins the depths before it after the block's last layer, which it ends."""
    chunk: Any = ctx.chunk_state
    progress = progress_of(chunk)
    chain = progress.mtp
    assert chain is not None
    hidden = layer._postprocess(hidden)
    if call is not None:
        hidden = call.end((hidden, chain.input_ids, chain.position_ids, chain.padding_mask))[0]
    if latest is not None:
        depths = torch.cat([depths, latest], dim=0)
    if not ctx.is_last_layer:
        return depths, hidden
    depths = torch.cat([depths, hidden], dim=0)
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
        "padding_mask": chunk.padding_mask,
        "embedding": chunk.model.embedding,
        **(chunk.extra_block_kwargs or {}),
    }
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
