"""A chunk of a Megatron-Core ``HybridModel``: what its forward does before, around and after its layers.

Mirrors ``HybridModel.forward`` and ``HybridStack.forward`` of megatron-core 0.19. The decoder's call and its final norm
are the chunk's and not its nodes', so that a layer class of a user's own needs to know of neither.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, final

from megatron.core import tensor_parallel
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.transformer.multi_token_prediction import process_mtp_loss
from megatron.core.utils import make_viewless_tensor
from torch import Tensor

from layernodes._megatron.chunk import ModelChunk
from layernodes._megatron.chunk_state import progress_of
from layernodes._megatron.decoder import as_received, begin_call, end_call
from layernodes._megatron.hybrid_support import check_hybrid_model
from layernodes.state import NodeContext

_UNUSED: Final = (
    *("rotary_pos_cos", "rotary_pos_sin", "sequence_len_offset", "extra_block_kwargs"),
    *("output_processor", "output_processor_context"),
)
"""What the state of a ``GPTModel``'s microbatch holds and this model does not have."""


@final
class _HybridStackCalls:
    """How ``HybridStack`` calls its layers; the chunk begins and ends its call."""

    forks_rng = False
    mtp_left_out = frozenset({"padding_mask", "rotary_pos_cos", "rotary_pos_sin", "sequence_len_offset"})

    def begin(self, _: Any, hidden: Tensor) -> Tensor:
        return hidden

    def end(self, _: Any, hidden: Tensor) -> Tensor:
        return hidden

    def layer_arguments(self, ctx: NodeContext, hidden: Tensor) -> dict[str, Any]:
        chunk: Any = ctx.chunk_state
        return {
            "hidden_states": hidden,
            "attention_mask": chunk.attention_mask,
            "inference_context": None,
            "rotary_pos_emb": chunk.rotary_pos_emb,
            "sequence_len_offset": None,
            "packed_seq_params": chunk.packed_seq_params,
            "padding_mask": None if ctx.is_mtp else chunk.padding_mask,
        }


_CALLS: Final = _HybridStackCalls()


@final
class HybridChunk(ModelChunk):
    """One part of a ``HybridModel``."""

    model_class = HybridModel

    def check(self) -> None:
        super().check()
        check_hybrid_model(self.model)

    @property
    def symbols(self) -> tuple[str, ...] | None:
        return (*self.model.decoder.layer_type_list, *(layer.mtp_layer_pattern for layer in self.mtp_layers))

    def new_state(self, batch: Any) -> Any:
        state = super().new_state(batch)
        for name in _UNUSED:
            setattr(state, name, None)
        progress_of(state).calls = _CALLS
        return state

    def pre_process(self, state: Any, hidden: Tensor | None) -> Tensor:
        model = self.model
        state.decoder_input = None
        given = hidden
        if hidden is None:
            hidden = model.embedding(input_ids=state.input_ids, position_ids=state.position_ids)
            if model.config.sequence_parallel and not model.embedding.scatter_to_sequence_parallel:
                hidden = tensor_parallel.scatter_to_sequence_parallel_region(hidden, group=model.pg_collection.tp)
        with as_received(model, given):
            state.rotary_pos_emb = _rotary(model, hidden, state.packed_seq_params)
        assert hidden is not None
        hidden = self._begin_decoder(state, hidden)
        return self._end_decoder(state, hidden) if not self.decoder_layers else hidden

    def ends_decoder(self, node: Callable[..., Any]) -> Callable[..., Any]:
        return lambda ctx, *inputs: self._end_decoder(ctx.chunk_state, node(ctx, *inputs))

    def _post_process(self, state: Any, hidden: Tensor) -> Tensor:
        model = self.model
        weight = model.shared_embedding_or_output_weight() if model.share_embeddings_and_output_weights else None
        if model.config.mtp_num_layers is not None and model.mtp_process:
            hidden = process_mtp_loss(
                hidden_states=hidden,
                labels=state.labels,
                loss_mask=state.loss_mask,
                output_layer=model.output_layer,
                output_weight=weight,
                runtime_gather_output=state.runtime_gather_output,
                is_training=model.training,
                compute_language_model_loss=model.compute_language_model_loss,
                config=model.config,
                cp_group=model.pg_collection.cp,
                tp_group=model.tp_group,
                packed_seq_params=state.packed_seq_params,
                scale_logits_fn=model._scale_logits if model.config.use_mup else None,
                input_ids=state.input_ids,
            )
        logits, _ = model.output_layer(hidden, weight=weight, runtime_gather_output=state.runtime_gather_output)
        logits = model._scale_logits(logits)
        output: Tensor
        if state.labels is None:
            output = logits.transpose(0, 1).contiguous()
        else:
            output = model.compute_language_model_loss(state.labels, logits)
        return output

    def _begin_decoder(self, state: Any, hidden: Tensor) -> Tensor:
        arguments = {
            "attention_mask": state.attention_mask,
            "inference_context": None,
            "rotary_pos_emb": state.rotary_pos_emb,
            "packed_seq_params": state.packed_seq_params,
            "padding_mask": state.padding_mask,
        }
        return begin_call(self.model, state, hidden, arguments)

    def _end_decoder(self, state: Any, hidden: Tensor) -> Tensor:
        decoder = self.model.decoder
        if decoder.post_process and decoder.post_layer_norm:
            hidden = decoder.final_norm(hidden)
        elif not self.model.pre_process and not self.decoder_layers:
            hidden = hidden.clone()  # else the chunk's output would be its input tensor
        hidden = make_viewless_tensor(inp=hidden, requires_grad=hidden.requires_grad, keep_graph=True)
        return end_call(state, hidden)


def _rotary(model: Any, hidden: Tensor | None, packed: Any) -> Any:
    """The rotary embedding of the microbatch; None where the model has none."""
    if model.position_embedding_type not in ("rope", "yarn"):
        return None
    is_yarn = model.position_embedding_type == "yarn"
    if not is_yarn and model.config.multi_latent_attention:
        return None
    rotary = model.rotary_pos_emb
    length = rotary.get_rotary_seq_len(None, model.decoder, hidden if model.pre_process else None, model.config, packed)
    embedding = rotary(length, packed_seq=packed is not None and packed.qkv_format == "thd")
    return embedding[0] if is_yarn else embedding  # yarn's comes with a scale, which the model drops
