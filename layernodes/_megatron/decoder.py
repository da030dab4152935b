"""The decoder's call around its layers, and the arguments with which it calls them.

Mirrors ``TransformerBlock.forward`` of megatron-core 0.19.
"""

from __future__ import annotations

from typing import Any

from megatron.core.typed_torch import apply_module
from megatron.core.utils import make_viewless_tensor
from torch import Tensor

from layernodes._megatron.calls import ModuleCall
from layernodes._megatron.chunk_state import progress_of
from layernodes.state import NodeContext


def begin_decoder(chunk: Any, hidden: Tensor) -> Tensor:
    """Begin the decoder's call, for its hooks; done by its first layer, or by pre-process where it has none."""
    model = getattr(chunk, "model", None)
    if model is None:
        return hidden
    arguments = {
        "hidden_states": hidden if model.pre_process else None,  # else the block takes its input tensor
        "attention_mask": chunk.attention_mask,
        "inference_context": None,
        "rotary_pos_emb": chunk.rotary_pos_emb,
        "rotary_pos_cos": chunk.rotary_pos_cos,
        "rotary_pos_sin": chunk.rotary_pos_sin,
        "rotary_pos_cos_sin": None,
        "packed_seq_params": chunk.packed_seq_params,
        "sequence_len_offset": chunk.sequence_len_offset,
        "padding_mask": chunk.padding_mask,
        **(chunk.extra_block_kwargs or {}),
    }
    call, arguments = ModuleCall.begin(model.decoder, (), arguments)
    progress_of(chunk).decoder_call = call
    return arguments["hidden_states"] if call is not None and model.pre_process else hidden


def end_decoder(chunk: Any, hidden: Tensor) -> Tensor:
    """Apply the decoder's final norm, where this chunk has it, and end the decoder's call."""
    model = getattr(chunk, "model", None)
    if model is None:
        return hidden
    norm = model.decoder.final_layernorm
    if norm is not None:
        hidden = apply_module(norm)(hidden)
        hidden = make_viewless_tensor(inp=hidden, requires_grad=True, keep_graph=True)
    elif not model.pre_process and len(model.decoder.layers) == 0:
        hidden = hidden.clone()  # else the chunk's output would be its input tensor
    progress = progress_of(chunk)
    if progress.decoder_call is not None:
        hidden = progress.decoder_call.end(hidden)
        progress.decoder_call = None
    return hidden


def layer_arguments(ctx: NodeContext, hidden: Tensor) -> dict[str, Any]:
    """The keyword arguments with which the plain block calls a layer, or an MTP layer its inner one."""
    chunk: Any = ctx.chunk_state
    arguments = {
        "hidden_states": hidden,
        "attention_mask": chunk.attention_mask,
        "context": None,
        "context_mask": None,
        "rotary_pos_emb": chunk.rotary_pos_emb,
        "rotary_pos_cos": chunk.rotary_pos_cos,
        "rotary_pos_sin": chunk.rotary_pos_sin,
    }
    if ctx.is_mtp:
        chain = progress_of(chunk).mtp
        assert chain is not None
        arguments |= {"attention_bias": None, "inference_params": None, "padding_mask": chain.padding_mask}
    else:
        extra = chunk.extra_block_kwargs or {}
        arguments |= {
            "rotary_pos_cos_sin": None,
            "attention_bias": extra.get("attention_bias"),
            "inference_context": None,
            "padding_mask": chunk.padding_mask,
        }
    arguments |= {
        "packed_seq_params": chunk.packed_seq_params,
        "sequence_len_offset": chunk.sequence_len_offset,
    }
    return arguments
