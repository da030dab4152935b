"""The slot before dispatch: attention, router and dispatch preprocess."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Final

from torch import Tensor

from layernodes._megatron.decoder import begin_decoder
from layernodes._megatron.layer_pass import LayerPass
from layernodes._megatron.mtp import join
from layernodes._megatron.wgrad import pre_dispatch_hook
from layernodes.nodes.layer_node import LayerNode
from layernodes.nodes.mtp_handoffs import MTP_HANDOFFS, enter_layer
from layernodes.slots import Slot, StreamType
from layernodes.state import HandoffMap, NodeContext
from layernodes.wgrad import WgradHook

if TYPE_CHECKING:
    from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionLayer
    from megatron.core.transformer.transformer_layer import TransformerLayer

_MOE_ONLY: Final = frozenset({"residual", "shared_expert_output", "pass_to_dispatch"})
_DENSE_ONLY: Final = frozenset({"pass_to_mlp"})
_MTP_ONLY: Final = frozenset(MTP_HANDOFFS)


class PreDispatchNode(LayerNode):
    """Attention, pre-MLP norm, shared experts, router and dispatch preprocess; of a dense layer, attention only.

    ======= =====================================================================================================
    slot    ``pre_dispatch_computation``
    stream  compute
    input   hidden states ``[s, b, h]``; under MTP those of all depths so far, ``[(1 + depth) * s, b, h]``
    output  tokens ``[tokens, h]`` and probs, as the dispatcher wants them; of a dense layer, hidden states
    writes  ``residual``, ``shared_expert_output``, ``pass_to_dispatch``; of a dense layer ``pass_to_mlp``; under MTP
            ``mtp_depths``, ``mtp_latest`` and ``mtp_call`` too
    frees   nothing: the input is the residual
    wgrad   attention, shared experts, ``fc1_latent_proj``, MTP ``eh_proj``
    ======= =====================================================================================================

    Mirrors ``TransformerLayer._forward_attention`` and the first half of ``MoELayer.forward``.
    """

    slot = Slot.PRE_DISPATCH_COMPUTATION
    stream = StreamType.COMPUTE
    writes: ClassVar[HandoffMap] = {
        "residual": Tensor,
        "shared_expert_output": Tensor | None,
        "pass_to_dispatch": LayerPass,
        "pass_to_mlp": LayerPass,
        **MTP_HANDOFFS,
    }

    def __init__(self, layer: TransformerLayer | MultiTokenPredictionLayer) -> None:
        super().__init__(layer)
        absent = _DENSE_ONLY if self._parts.moe is not None else _MOE_ONLY
        self._narrow(absent if self._parts.mtp is not None else absent | _MTP_ONLY)

    def forward(self, ctx: NodeContext, *inputs: Tensor) -> Tensor | tuple[Tensor, ...]:
        (hidden,) = inputs
        parts = self._parts
        mtp = parts.mtp
        if mtp is not None:
            entry = enter_layer(self, ctx, mtp, hidden)
            with parts.rng(ctx):
                return self._run_layer(ctx, join(mtp, entry))
        if ctx.is_first_layer:
            hidden = begin_decoder(ctx.chunk_state, hidden)
        with parts.rng(ctx):
            return self._run_layer(ctx, hidden)

    def _run_layer(self, ctx: NodeContext, hidden: Tensor) -> Tensor | tuple[Tensor, ...]:
        if self._parts.moe is None:
            layer_pass, hidden = self._parts.attend_dense(ctx, hidden)
            self.put(ctx, "pass_to_mlp", layer_pass)
            return hidden
        layer_pass, routed = self._parts.attend_and_route(ctx, hidden)
        self.put(ctx, "residual", routed.residual)
        self.put(ctx, "shared_expert_output", routed.shared_expert_output)
        self.put(ctx, "pass_to_dispatch", layer_pass)
        return routed.tokens, routed.probs

    def wgrad_hook(self) -> WgradHook | None:
        return pre_dispatch_hook(self._parts)
