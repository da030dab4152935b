"""The decoder's call around its layers, and the arguments with which it calls them.

Mirrors ``TransformerBlock.forward`` of megatron-core 0.19; a microbatch of a model with another decoder says so in its
``ChunkProgress``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Final, final

from megatron.core import tensor_parallel
from megatron.core.typed_torch import apply_module
from megatron.core.utils import make_viewless_tensor
from torch import Tensor

from layernodes._megatron.calls import ModuleCall
from layernodes._megatron.chunk_state import DecoderCalls, progress_of
from layernodes.state import NodeContext


def begin_decoder(chunk: Any, hidden: Tensor) -> Tensor:
    """Begin the decoder's call, for its hooks; done by its first layer, or by pre-process where it has none."""
    return calls_of(chunk).begin(chunk, hidden)


def end_decoder(chunk: Any, hidden: Tensor) -> Tensor:
    """Apply the decoder's final norm, where this chunk has it, and end the decoder's call."""
    return calls_of(chunk).end(chunk, hidden)


def layer_arguments(ctx: NodeContext, hidden: Tensor) -> dict[str, Any]:
    """The keyword arguments with which the plain block calls a layer, or an MTP layer its inner one."""
    return calls_of(ctx.chunk_state).layer_arguments(ctx, hidden)


def layer_rng(ctx: NodeContext, config: Any) -> AbstractContextManager[Any]:
    """The model-parallel RNG fork under which the plain model runs the layer, where it does: with sequence
    parallelism."""
    if config.sequence_parallel and (ctx.is_mtp or calls_of(ctx.chunk_state).forks_rng):
        fork: AbstractContextManager[Any] = tensor_parallel.get_cuda_rng_tracker().fork()
        return fork
    return nullcontext()


def calls_of(chunk: Any) -> DecoderCalls:
    """How the decoder of this microbatch's model calls its layers."""
    return progress_of(chunk).calls or _TRANSFORMER_BLOCK


def begin_call(model: Any, chunk: Any, hidden: Tensor, arguments: dict[str, Any]) -> Tensor:
    """Begin the call of the model's decoder, for its hooks, with hidden states and the other arguments; returns the
    hidden states that its layers work on."""
    arguments = {"hidden_states": hidden if model.pre_process else None, **arguments}  # else it takes its input tensor
    call, arguments = ModuleCall.begin(model.decoder, (), arguments)
    progress_of(chunk).decoder_call = call
    return arguments["hidden_states"] if call is not None and model.pre_process else hidden


def end_call(chunk: Any, hidden: Tensor) -> Tensor:
    """End the decoder's call, if one is in progress."""
    progress = progress_of(chunk)
    call, progress.decoder_call = progress.decoder_call, None
    return hidden if call is None else call.end(hidden)


@contextmanager
def as_received(model: Any, hidden: Tensor | None) -> Iterator[None]:
    """Let a part of a pipeline hold ``hidden`` as what it received: rotary embeddings read their length off it."""
    received = model.decoder.input_tensor
    if not model.pre_process:
        model.set_input_tensor(hidden)
    try:
        yield
    finally:
        model.set_input_tensor(received)


def _begin(chunk: Any, hidden: Tensor) -> Tensor:
    model = getattr(chunk, "model", None)
    if model is None:
        return hidden
    arguments = {
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
    return begin_call(model, chunk, hidden, arguments)


def _end(chunk: Any, hidden: Tensor) -> Tensor:
    model = getattr(chunk, "model", None)
    if model is None:
        return hidden
    norm = model.decoder.final_layernorm
    if norm is not None:
        hidden = apply_module(norm)(hidden)
        hidden = make_viewless_tensor(inp=hidden, requires_grad=True, keep_graph=True)
    elif not model.pre_process and len(model.decoder.layers) == 0:
        hidden = hidden.clone()  # else the chunk's output would be its input tensor
    return end_call(chunk, hidden)


def _layer_arguments(ctx: NodeContext, hidden: Tensor) -> dict[str, Any]:
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


@final
class _TransformerBlockCalls:
    """How ``TransformerBlock`` calls its layers."""

    forks_rng = True
    mtp_left_out: frozenset[str] = frozenset()
    begin = staticmethod(_begin)
    end = staticmethod(_end)
    layer_arguments = staticmethod(_layer_arguments)


_TRANSFORMER_BLOCK: Final = _TransformerBlockCalls()
