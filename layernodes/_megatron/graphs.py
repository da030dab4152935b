"""A layer's CUDA graphs: from its input to the tokens that leave for their experts, in one replay."""

from __future__ import annotations

from typing import Final

from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor

from layernodes._megatron.decoder import layer_arguments
from layernodes._megatron.layer_pass import LayerPass, Routed
from layernodes._megatron.private import private_layer, private_moe, seal
from layernodes.errors import UnsupportedLayerError
from layernodes.state import NodeContext

_ARGUMENTS: Final = (
    "hidden_states",
    "attention_mask",
    "rotary_pos_emb",
    "rotary_pos_cos",
    "rotary_pos_sin",
    "packed_seq_params",
    "sequence_len_offset",
)


def replay(layer: TransformerLayer, ctx: NodeContext, hidden: Tensor) -> tuple[LayerPass, Routed]:
    """Replay the layer's CUDA graphs up to dispatch, as ``submodule_pre_dispatch_forward`` does.

    Raises:
        UnsupportedLayerError: graphs captured for the plain layer, whose replay runs the rest of it too.
    """
    if not layer.config.overlap_moe_expert_parallel_comm:
        raise UnsupportedLayerError(
            f"layer {layer.layer_number} has CUDA graphs, and overlap_moe_expert_parallel_comm is off: a replay runs "
            f"the whole layer in one slot, and the graphs are captured for the plain model's order of microbatches; "
            f"capture them with the flag on (inside layernodes.megatron.schedule() it is), or capture none",
            field="overlap_moe_expert_parallel_comm",
            value=False,
        )
    arguments = layer_arguments(ctx, hidden)
    if getattr(layer, "backward_dw_wrapper", None) is None:  # nobody defers weight gradients here
        layer.init_backward_dw_wrapper()
    layer.set_te_cuda_graph_backward_dw_wrapper()
    layer_pass = LayerPass(layer=private_layer(layer), padding_mask=arguments["padding_mask"])
    moe: MoELayer | None = layer.mlp if isinstance(layer.mlp, MoELayer) else None
    if moe is not None:
        own = private_moe(moe)
        layer_pass.layer = _with_mlp(layer_pass.layer, own)
        layer_pass.moes.append(own)
        layer_pass.moe_calls.append(None)
    graph_arguments = {name: arguments[name] for name in _ARGUMENTS}
    residual, tokens, probs, shared_output = layer_pass.layer._te_cuda_graph_replay(**graph_arguments)
    if moe is not None:
        seal(own, moe)
    return layer_pass, Routed(residual, shared_output, tokens, probs)


def _with_mlp(layer: TransformerLayer, moe: MoELayer) -> TransformerLayer:
    layer.__dict__["_modules"] = {**layer.__dict__["_modules"], "mlp": moe}
    return layer
