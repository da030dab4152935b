"""The combine slot: the experts' output travels back to the ranks of its tokens."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor
from torch.nn import Module

from layernodes._megatron.freeing import combine_uses_input
from layernodes._megatron.layer_pass import LayerPass
from layernodes._megatron.wgrad import latent_hook
from layernodes.nodes.layer_node import LayerNode
from layernodes.slots import Slot, StreamType
from layernodes.state import HandoffMap, NodeContext
from layernodes.wgrad import WgradHook


class CombineNode(LayerNode):
    """The combine all-to-all, un-permute, latent projection back, shared experts' add, bias-dropout-add residual.

    ======= =====================================================================================================
    slot    ``moe_combine``
    stream  communication
    input   the experts' output ``[received tokens, h]``
    output  the layer's output ``[s, b, h]``, final norm included on the decoder's last layer
    reads   ``pass_to_combine``, ``residual``, ``shared_expert_output``
    frees   its input: an exchange does not save it
    wgrad   ``fc2_latent_proj``
    ======= =====================================================================================================

    Mirrors ``MoELayer.combine`` and ``postprocess``, and ``TransformerLayer._forward_post_mlp``. The exchange comes
    first, so that it starts at once and the rest does not compete with another microbatch's computation meanwhile.
    """

    slot = Slot.MOE_COMBINE
    stream = StreamType.COMM
    reads: ClassVar[HandoffMap] = {
        "pass_to_combine": LayerPass,
        "residual": Tensor,
        "shared_expert_output": Tensor | None,
    }

    def forward(self, ctx: NodeContext, *inputs: Tensor) -> Tensor | tuple[Tensor, ...]:
        layer_pass = self.take(ctx, "pass_to_combine")
        assert isinstance(layer_pass, LayerPass)
        residual, shared_expert_output = _take_residuals(self, ctx)
        # Nothing here holds the combined tokens, so that they go as soon as they are un-permuted.
        return self._parts.finish(
            ctx, layer_pass, self._parts.combine(layer_pass, *inputs), residual, shared_expert_output
        )

    def wgrad_hook(self) -> WgradHook | None:
        return latent_hook(self._parts)

    def frees_input(self) -> bool:
        return True

    def keeps_input(self) -> bool:
        return type(self) is not CombineNode or combine_uses_input(self._parts)


class CombineExchangeNode(CombineNode):
    """The combine all-to-all alone, for plans with ``split_combine=True``; ``PostCombineNode`` does the rest.

    ======= =====================================================================================================
    slot    ``moe_combine``
    stream  communication
    input   the experts' output ``[received tokens, h]``
    output  the combined tokens, still permuted
    reads   ``pass_to_combine``
    writes  ``pass_to_post_combine``
    frees   its input
    wgrad   nothing
    ======= =====================================================================================================
    """

    reads: ClassVar[HandoffMap] = {"pass_to_combine": LayerPass}
    writes: ClassVar[HandoffMap] = {"pass_to_post_combine": LayerPass}

    def forward(self, ctx: NodeContext, *inputs: Tensor) -> Tensor | tuple[Tensor, ...]:
        (output,) = inputs
        layer_pass = self.take(ctx, "pass_to_combine")
        assert isinstance(layer_pass, LayerPass)
        output = self._parts.combine(layer_pass, output)
        self.put(ctx, "pass_to_post_combine", layer_pass)
        return output

    def modules(self) -> tuple[Module, ...]:
        return self._own_modules()

    def touches_rng(self) -> bool:
        return False

    def wgrad_hook(self) -> WgradHook | None:
        return None


class PostCombineNode(LayerNode):
    """Everything after the combine all-to-all, on the compute stream, for plans with ``split_combine=True``.

    ======= =====================================================================================================
    slot    ``post_combine``
    stream  compute
    input   the combined tokens, still permuted
    output  the layer's output ``[s, b, h]``, final norm included on the decoder's last layer
    reads   ``pass_to_post_combine``, ``residual``, ``shared_expert_output``
    frees   nothing
    wgrad   ``fc2_latent_proj``
    ======= =====================================================================================================
    """

    slot = Slot.POST_COMBINE
    stream = StreamType.COMPUTE
    reads: ClassVar[HandoffMap] = {
        "pass_to_post_combine": LayerPass,
        "residual": Tensor,
        "shared_expert_output": Tensor | None,
    }

    def forward(self, ctx: NodeContext, *inputs: Tensor) -> Tensor | tuple[Tensor, ...]:
        layer_pass = self.take(ctx, "pass_to_post_combine")
        assert isinstance(layer_pass, LayerPass)
        (output,) = inputs
        residual, shared_expert_output = _take_residuals(self, ctx)
        return self._parts.finish(ctx, layer_pass, output, residual, shared_expert_output)

    def wgrad_hook(self) -> WgradHook | None:
        return latent_hook(self._parts)


def _take_residuals(node: CombineNode | PostCombineNode, ctx: NodeContext) -> tuple[Tensor, Tensor | None]:
    residual = node.take(ctx, "residual")
    shared_expert_output = node.take(ctx, "shared_expert_output")
    assert isinstance(residual, Tensor)
    assert isinstance(shared_expert_output, Tensor | None)
    return residual, shared_expert_output
