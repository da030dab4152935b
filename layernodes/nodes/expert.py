"""The mlp slot: routed experts, or the dense MLP."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Final

from torch import Tensor

from layernodes._megatron.freeing import experts_use_input
from layernodes._megatron.layer_pass import LayerPass
from layernodes._megatron.wgrad import mlp_hook
from layernodes.nodes.layer_node import LayerNode
from layernodes.slots import Slot, StreamType
from layernodes.state import HandoffMap, NodeContext
from layernodes.wgrad import WgradHook

if TYPE_CHECKING:
    from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionLayer
    from megatron.core.transformer.transformer_layer import TransformerLayer

_MOE_ONLY: Final = frozenset({"dispatched_probs", "pass_to_combine"})


class ExpertNode(LayerNode):
    """Dispatch postprocess, routed experts, combine preprocess; of a dense layer, pre-MLP norm, MLP and residual.

    ======= =====================================================================================================
    slot    ``mlp``
    stream  compute
    input   the tokens of this rank's experts ``[received tokens, h]``; of a dense layer hidden states ``[s, b, h]``
    output  the experts' output in the order in which it returns; of a dense layer the layer's output ``[s, b, h]``,
            final norm included on the decoder's last layer
    reads   ``pass_to_mlp``, ``dispatched_probs``
    writes  ``pass_to_combine``
    frees   its input where nothing saved it: sorting by expert makes a copy, passing through does not
    wgrad   routed experts, or the dense MLP
    ======= =====================================================================================================

    Mirrors ``MoELayer.routed_experts_compute`` and, for a dense layer, ``TransformerLayer._forward_mlp``.
    """

    slot = Slot.MLP
    stream = StreamType.COMPUTE
    reads: ClassVar[HandoffMap] = {"dispatched_probs": Tensor, "pass_to_mlp": LayerPass}
    writes: ClassVar[HandoffMap] = {"pass_to_combine": LayerPass}

    def __init__(self, layer: TransformerLayer | MultiTokenPredictionLayer) -> None:
        super().__init__(layer)
        if self._parts.moe is None:
            self._narrow(_MOE_ONLY)

    def forward(self, ctx: NodeContext, *inputs: Tensor) -> Tensor | tuple[Tensor, ...]:
        (tokens,) = inputs
        layer_pass = self.take(ctx, "pass_to_mlp")
        assert isinstance(layer_pass, LayerPass)
        if self._parts.moe is None:
            with self._parts.rng(ctx):
                return self._parts.dense(ctx, layer_pass, tokens)
        probs = self.take(ctx, "dispatched_probs")
        assert isinstance(probs, Tensor)
        with self._parts.rng(ctx):
            output = self._parts.experts(layer_pass, tokens, probs)
        self.put(ctx, "pass_to_combine", layer_pass)
        return output

    def wgrad_hook(self) -> WgradHook | None:
        return mlp_hook(self._parts)

    def frees_input(self) -> bool:
        return self._parts.moe is not None

    def keeps_input(self) -> bool:
        return type(self) is not ExpertNode or experts_use_input(self._parts)
