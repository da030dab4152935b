"""The parts of a Megatron-Core ``TransformerLayer``, each runnable on its own for one microbatch.

Mirrors ``TransformerLayer.forward``, ``TransformerLayer._forward_mlp`` and ``MoELayer.forward`` of megatron-core 0.19:

    attend    input norm, self-attention, residual
    route     pre-MLP norm, shared experts, router, dispatch preprocess
    dispatch  token exchange                                                 (communication)
    experts   dispatch postprocess, routed experts, combine preprocess
    combine   token exchange                                                 (communication)
    finish    un-permute, latent projection, shared experts' add, residual, the decoder's final norm
    dense     pre-MLP norm, dense MLP, residual, the decoder's final norm

All of them work on a ``LayerPass``: one microbatch's private view of the layer.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, final

import torch
from megatron.core.pipeline_parallel.utils import StageDispatchBwdGrad
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.token_dispatcher import MoEAllGatherTokenDispatcher
from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionLayer
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor

from layernodes._megatron.calls import ModuleCall
from layernodes._megatron.decoder import end_decoder, layer_arguments, layer_rng
from layernodes._megatron.graphs import replay
from layernodes._megatron.layer_pass import LayerPass, Routed
from layernodes._megatron.overlapped_experts import run_overlapped_shared_experts
from layernodes._megatron.private import (
    PrivateAllGatherDispatcher,
    adopt,
    private_layer,
    private_moe,
    seal,
)
from layernodes._megatron.streams import current_device_stream
from layernodes._megatron.support import refuse_training, trains_in_parallel
from layernodes.state import NodeContext


@final
class LayerParts:
    """Runs the parts of one layer. Bound to the layer, shared by all microbatches, without state of its own.

    Args:
        layer: a ``TransformerLayer``, or a ``MultiTokenPredictionLayer`` whose inner layer is one.
    """

    def __init__(self, layer: TransformerLayer | MultiTokenPredictionLayer) -> None:
        self.mtp = layer if isinstance(layer, MultiTokenPredictionLayer) else None
        self.layer: TransformerLayer = layer.mtp_model_layer if self.mtp is not None else layer
        self.config = self.layer.config
        self.moe: MoELayer | None = self.layer.mlp if isinstance(self.layer.mlp, MoELayer) else None
        self._may_train = self.moe is None or trains_in_parallel(self.layer)

    @property
    def num_local_experts(self) -> int | None:
        """Experts on this rank; None for a dense layer."""
        return None if self.moe is None else int(self.moe.num_local_experts)

    def rng(self, ctx: NodeContext) -> AbstractContextManager[Any]:
        """The model-parallel RNG fork under which the plain model runs the layer, where it does."""
        return layer_rng(ctx, self.config)

    def attend(self, ctx: NodeContext, hidden: Tensor) -> tuple[LayerPass, Tensor]:
        """Begin a pass and run it up to the residual after attention, ``[s, b, h]``."""
        arguments = layer_arguments(ctx, hidden)
        call, arguments = ModuleCall.begin(self.layer, (), arguments)
        layer_pass = LayerPass(
            layer=private_layer(self.layer),
            call=call,
            packed_seq_params=arguments["packed_seq_params"],
            padding_mask=arguments["padding_mask"],
        )
        hidden, layer_pass.context = layer_pass.layer._forward_attention(**arguments)
        return layer_pass, hidden

    def attend_and_route(self, ctx: NodeContext, hidden: Tensor) -> tuple[LayerPass, Routed]:
        """``attend`` and ``route``, by CUDA-graph replay where the layer has graphs (``_te_cuda_graph_replay``)."""
        if getattr(self.layer, "cuda_graphs", None):
            return replay(self.layer, ctx, hidden)
        layer_pass, hidden = self.attend(ctx, hidden)
        return layer_pass, self.route(layer_pass, hidden)

    def attend_dense(self, ctx: NodeContext, hidden: Tensor) -> tuple[LayerPass, Tensor]:
        """``attend`` of a dense layer, by CUDA-graph replay where the layer has graphs."""
        if getattr(self.layer, "cuda_graphs", None):
            layer_pass, routed = replay(self.layer, ctx, hidden)
            return layer_pass, routed.residual
        return self.attend(ctx, hidden)

    def route(self, layer_pass: LayerPass, hidden: Tensor) -> Routed:
        """From the residual after attention to the tokens that leave for their experts.

        With ``mlp_chunks_for_training`` the tokens and probs of the chunks follow one another.
        """
        layer = layer_pass.layer
        if layer.training and not self._may_train:  # it was built in eval mode
            refuse_training(layer)
        normed = layer._forward_pre_mlp_layernorm(hidden)
        if isinstance(normed, tuple):  # a fused residual norm
            normed, residual = normed
        else:
            residual = hidden
        if self.config.fp32_residual_connection:
            residual = residual.float()
        normed, mask, layer_pass.unflatten_mbs = layer._maybe_unflatten_for_moe(
            normed, layer_pass.padding_mask, layer_pass.packed_seq_params
        )
        # The plain layer hands no mask to chunks, nor to the one chunk that a single row of tokens makes.
        arguments = {} if self._is_chunked else {"padding_mask": mask}
        num_chunks = min(int(self.config.mlp_chunks_for_training), normed.shape[0]) if self._is_chunked else 1
        if num_chunks == 1:
            shared_output, tokens, probs = self._route_chunk(layer_pass, normed, arguments)
            return Routed(residual, shared_output, tokens, probs)
        routed = [self._route_chunk(layer_pass, chunk, arguments) for chunk in normed.chunk(num_chunks, dim=0)]
        shared_outputs = [shared for shared, _, _ in routed if shared is not None]
        layer_pass.sizes = [tokens.shape[0] for _, tokens, _ in routed]
        return Routed(
            residual,
            torch.cat(shared_outputs) if shared_outputs else None,
            torch.cat([tokens for _, tokens, _ in routed]),
            torch.cat([probs for _, _, probs in routed]),
        )

    def dispatch(self, layer_pass: LayerPass, tokens: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """Exchange tokens and their probs; returns those that this rank's experts work on."""
        return self._each_chunk_pair(layer_pass, self._dispatch_chunk, tokens, probs)

    def experts(self, layer_pass: LayerPass, tokens: Tensor, probs: Tensor) -> Tensor:
        """Run the routed experts; the recompute of a discarded pre-MLP norm hangs on their output."""
        output = self._each_chunk(layer_pass, self._experts_chunk, tokens, probs)
        if layer_pass.layer.recompute_pre_mlp_layernorm:
            layer_pass.layer.pre_mlp_norm_checkpoint.discard_output_and_register_recompute(output)
        return output

    def combine(self, layer_pass: LayerPass, output: Tensor) -> Tensor:
        """Return the experts' output to the ranks that the tokens came from."""
        return self._each_chunk(layer_pass, self._combine_chunk, output)

    def finish(
        self,
        ctx: NodeContext,
        layer_pass: LayerPass,
        output: Tensor,
        residual: Tensor,
        shared_expert_output: Tensor | None,
    ) -> Tensor:
        """From the combined tokens to the layer's output ``[s, b, h]``."""
        with self.rng(ctx):
            output = self._post_process(layer_pass, output, shared_expert_output)
            layer = layer_pass.layer
            output = layer._maybe_reflatten_from_moe(output, layer_pass.packed_seq_params, layer_pass.unflatten_mbs)
            if layer.recompute_pre_mlp_layernorm:
                layer.recompute_pre_mlp_layernorm = False  # hangs on the experts' output already
            output = layer._forward_post_mlp((output, None), residual)
            return self._end(ctx, layer_pass, output)

    def dense(self, ctx: NodeContext, layer_pass: LayerPass, hidden: Tensor) -> Tensor:
        """The second half of a dense layer, ``[s, b, h]``."""
        output = layer_pass.layer._forward_mlp(
            hidden, padding_mask=layer_pass.padding_mask, packed_seq_params=layer_pass.packed_seq_params
        )
        return self._end(ctx, layer_pass, output)

    @property
    def _is_chunked(self) -> bool:
        return bool(self.config.mlp_chunks_for_training > 1 and self.layer.training)

    def _route_chunk(
        self, layer_pass: LayerPass, normed: Tensor, arguments: dict[str, Any]
    ) -> tuple[Tensor | None, Tensor, Tensor]:
        assert self.moe is not None
        call, arguments = ModuleCall.begin(self.moe, (normed,), arguments)
        if call is not None:
            (normed,) = call.args
        moe = private_moe(self.moe)
        mask = arguments.get("padding_mask")
        if mask is not None:
            mask = mask.transpose(0, 1).bool()
        shared_output = moe.shared_experts_compute(normed)
        probs, routing_map = moe.route(normed, mask)
        tokens, probs = moe.preprocess(normed, probs, routing_map)
        if moe.shared_expert_overlap:
            shared_output = run_overlapped_shared_experts(moe, tokens)
        seal(moe, self.moe)
        layer_pass.moes.append(moe)
        layer_pass.moe_calls.append(call)
        return shared_output, tokens, probs

    def _dispatch_chunk(self, moe: MoELayer, tokens: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        assert self.moe is not None
        dispatcher = moe.token_dispatcher
        if self.config.moe_token_dispatcher_type == "flex":
            dispatcher._comm_manager.token_probs = probs
        in_global_buffer = _gathers_into_global_buffer(dispatcher)
        if in_global_buffer:
            tokens = _OwnGradient.apply(tokens)
        tokens, probs = moe.dispatch(tokens, probs)
        if in_global_buffer:
            tokens = tokens.clone()
        if self.config.moe_token_dispatcher_type == "flex" and self.config.moe_ncclep_zero_copy:
            # The sole consumer of the dispatch output, so that dispatch's backward is given the symmetric buffer.
            tokens = StageDispatchBwdGrad.apply(tokens, dispatcher)
        seal(moe, self.moe)
        return tokens, probs

    def _experts_chunk(self, moe: MoELayer, tokens: Tensor, probs: Tensor) -> Tensor:
        assert self.moe is not None
        if self.config.moe_token_dispatcher_type == "flex":
            moe.token_dispatcher._comm_manager.dispatched_probs = probs
        output: Tensor = moe.routed_experts_compute(tokens, probs)[0]
        seal(moe, self.moe)
        return output

    def _combine_chunk(self, moe: MoELayer, output: Tensor) -> Tensor:
        combined: Tensor = moe.combine(output)
        return combined

    def _each_chunk(self, layer_pass: LayerPass, run: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
        """Run one slot on each chunk's private MoE layer; the chunks' rows follow one another."""
        stream = current_device_stream(tensors[0])
        for moe in layer_pass.moes:
            adopt(moe, stream)
        if len(layer_pass.moes) == 1:
            return run(layer_pass.moes[0], *tensors)
        chunks = zip(*(torch.split(t, layer_pass.sizes) for t in tensors), strict=True)
        outputs = [run(moe, *chunk) for moe, chunk in zip(layer_pass.moes, chunks, strict=True)]
        layer_pass.sizes = [output.shape[0] for output in outputs]
        return torch.cat(outputs)

    def _each_chunk_pair(
        self, layer_pass: LayerPass, run: Callable[..., tuple[Tensor, Tensor]], *tensors: Tensor
    ) -> tuple[Tensor, Tensor]:
        second: list[Tensor] = []

        def first(moe: MoELayer, *chunk: Tensor) -> Tensor:
            tokens, probs = run(moe, *chunk)
            second.append(probs)
            return tokens

        tokens = self._each_chunk(layer_pass, first, *tensors)
        return tokens, second[0] if len(second) == 1 else torch.cat(second)

    def _post_process(self, layer_pass: LayerPass, output: Tensor, shared_expert_output: Tensor | None) -> Tensor:
        """Un-permute, project back, add the shared experts' output, and end the calls of the MoE layer."""
        moes = layer_pass.moes
        if len(moes) == 1:
            return self._end_moe_call(layer_pass, 0, moes[0].postprocess(output, shared_expert_output))
        chunks = torch.split(output, layer_pass.sizes)
        parts = [moe.postprocess(chunk, None) for moe, chunk in zip(moes, chunks, strict=True)]
        if shared_expert_output is not None:
            shared_chunks = torch.split(shared_expert_output, [part.shape[0] for part in parts])
            parts = [part + shared for part, shared in zip(parts, shared_chunks, strict=True)]
        return torch.cat([self._end_moe_call(layer_pass, i, part) for i, part in enumerate(parts)])

    def _end_moe_call(self, layer_pass: LayerPass, i: int, output: Tensor) -> Tensor:
        call = layer_pass.moe_calls[i]
        return output if call is None else call.end((output, None))[0]

    def _end(self, ctx: NodeContext, layer_pass: LayerPass, output: Tensor) -> Tensor:
        """End the layer's call, and on the decoder's last layer apply its final norm and end its call."""
        if layer_pass.call is not None:
            output, _ = layer_pass.call.end((output, layer_pass.context))
        if ctx.is_last_layer and not ctx.is_mtp:
            output = end_decoder(ctx.chunk_state, output)
        return output


def _gathers_into_global_buffer(dispatcher: Any) -> bool:
    """Whether dispatch leaves its tokens in the buffer that all of the process shares: that of a subclass may."""
    if isinstance(dispatcher, PrivateAllGatherDispatcher) or not isinstance(dispatcher, MoEAllGatherTokenDispatcher):
        return False
    return bool(dispatcher.tp_size > 1 or dispatcher.ep_size > 1)


class _OwnGradient(torch.autograd.Function):
    """Identity whose gradient is copied: the gather's backward leaves it in the process-global buffer."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor) -> Tensor:
        return tokens.view_as(tokens)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.clone()
