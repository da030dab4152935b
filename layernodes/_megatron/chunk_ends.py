"""What a ``GPTModel`` chunk does before its first layer and after its last.

Mirrors ``GPTModel._preprocess`` and ``_postprocess`` as ``GPTModel.forward`` of megatron-core 0.19 calls them.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from layernodes._megatron.decoder import as_received, begin_decoder, end_decoder
from layernodes.errors import UnsupportedLayerError


def pre_process(model: Any, state: Any, hidden: Tensor | None) -> Tensor:
    """Embed, or take the previous part's hidden states; leave rotary inputs and masks on the state.

    Args:
        model: the ``GPTModel`` chunk.
        state: the microbatch's chunk state.
        hidden: ``[s, b, h]`` from the previous part, or given in place of an embedding; None to embed.

    Returns:
        ``[s, b, h]``, for the first layer.
    """
    if hidden is not None:
        state.decoder_input = hidden
    with as_received(model, hidden):
        (
            decoder_input,
            state.rotary_pos_emb,
            state.rotary_pos_cos,
            state.rotary_pos_sin,
            state.sequence_len_offset,
            state.padding_mask,
        ) = model._preprocess(
            input_ids=state.input_ids,
            position_ids=state.position_ids,
            decoder_input=state.decoder_input,
            packed_seq_params=state.packed_seq_params,
            padding_mask=state.padding_mask,
        )
    state.decoder_input = None
    if state.output_processor is not None and model.pre_process:
        state.decoder_input = _for_processor(decoder_input)
    output: Tensor = decoder_input
    if len(model.decoder.layers) == 0:
        output = begin_decoder(state, output)
        if getattr(model, "mtp", None) is None:
            output = end_decoder(state, output)
    return output


def _for_processor(decoder_input: Tensor) -> Tensor:
    """What an output processor is given of the embeddings: a graph from here to the chunk's tail would bypass the slots
    of the layers, so a gradient is refused, not lost."""
    seen = decoder_input.detach()
    if decoder_input.requires_grad:
        seen.requires_grad_(True)
        seen.register_hook(_refuse_gradient)  # type: ignore[no-untyped-call]  # torch leaves it untyped
    return seen


def _refuse_gradient(_: Tensor) -> None:
    raise UnsupportedLayerError(
        "the output processor differentiates through decoder_input, whose gradient would bypass the layers between; "
        "use decoder_input.detach() in it",
        field="output_processor",
        value="decoder_input",
    )


def post_process(model: Any, state: Any, hidden: Tensor) -> Tensor:
    """Logits ``[b, s, vocab]``, or the loss of each token ``[b, s]`` where labels are given.

    The model's MTP block is not run: its layers have slots of their own.
    """
    output: Tensor = model._postprocess(
        hidden_states=hidden,
        input_ids=state.input_ids,
        position_ids=state.position_ids,
        labels=state.labels,
        decoder_input=state.decoder_input,
        rotary_pos_emb=state.rotary_pos_emb,
        rotary_pos_cos=state.rotary_pos_cos,
        rotary_pos_sin=state.rotary_pos_sin,
        mtp_in_postprocess=False,
        loss_mask=state.loss_mask,
        attention_mask=state.attention_mask,
        padding_mask=state.padding_mask,
        packed_seq_params=state.packed_seq_params,
        sequence_len_offset=state.sequence_len_offset,
        runtime_gather_output=state.runtime_gather_output,
        extra_block_kwargs=state.extra_block_kwargs,
        output_processor=state.output_processor,
        output_processor_context=state.output_processor_context,
    )
    return output


def one_tensor(output: Any) -> Tensor:
    """What a chunk returned in Megatron-Core's combined step, which gives one tensor to the loss function.

    Raises:
        UnsupportedLayerError: an output processor, or a node of one's own, returned something else.
    """
    if not isinstance(output, Tensor):
        raise UnsupportedLayerError(
            f"the output processor (or the last node) returned a {type(output).__name__}, and Megatron-Core's combined "
            f"step gives one tensor to the loss function, unlike its plain step; return one tensor, such "
            f"as torch.stack(...) or torch.cat(...) of several",
            field="output_processor",
            value=type(output),
        )
    return output
