"""Layers that are one slot: attention alone, an MLP alone, a state-space mixer. Their other slots pass through."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.nn import Module, Parameter

from layernodes._megatron.decoder import begin_decoder, end_decoder, layer_rng
from layernodes._megatron.support import check_layer
from layernodes._megatron.wgrad import ModulesHook, attention_hook, held_back_hook, mlp_hook, own_deferred_parameters
from layernodes.nodes.base import ScheduleNode
from layernodes.nodes.layer_node import LayerNode
from layernodes.slots import Slot, StreamType
from layernodes.state import NodeContext
from layernodes.wgrad import WgradHook

if TYPE_CHECKING:
    from megatron.core.ssm.mamba_layer import MambaLayer


class _WholeLayerNode(LayerNode):
    """A ``TransformerLayer`` that has attention or an MLP and not both."""

    def forward(self, ctx: NodeContext, *inputs: Tensor) -> Tensor | tuple[Tensor, ...]:
        (hidden,) = inputs
        if ctx.is_first_layer and not ctx.is_mtp:
            hidden = begin_decoder(ctx.chunk_state, hidden)
        with self._parts.rng(ctx):
            layer_pass, hidden = self._parts.attend_dense(ctx, hidden)
            return self._parts.dense(ctx, layer_pass, hidden)

    @abstractmethod
    def wgrad_hook(self) -> WgradHook | None: ...

    def modules(self) -> tuple[Module, ...]:
        return (self._parts.layer, *self._own_modules())


class AttentionNode(_WholeLayerNode):
    """Attention of a layer that has no MLP; also a gated delta net in its place.

    ======= =====================================================================================================
    slot    ``pre_dispatch_computation``
    stream  compute
    input   hidden states ``[s, b, h]``
    output  hidden states ``[s, b, h]``
    frees   nothing: the input is the residual
    wgrad   attention
    ======= =====================================================================================================

    Mirrors ``TransformerLayer.forward``, whose MLP is the identity.
    """

    slot = Slot.PRE_DISPATCH_COMPUTATION
    stream = StreamType.COMPUTE

    def wgrad_hook(self) -> WgradHook | None:
        return attention_hook(self._parts)


class MLPNode(_WholeLayerNode):
    """The MLP of a layer that has no attention (``MLPLayer``).

    ======= =====================================================================================================
    slot    ``mlp``
    stream  compute
    input   hidden states ``[s, b, h]``
    output  hidden states ``[s, b, h]``
    frees   nothing: the input is the residual
    wgrad   the MLP
    ======= =====================================================================================================

    Mirrors ``TransformerLayer.forward``, whose attention is the identity.
    """

    slot = Slot.MLP
    stream = StreamType.COMPUTE

    def wgrad_hook(self) -> WgradHook | None:
        return mlp_hook(self._parts)


class MixerNode(ScheduleNode):
    """A state-space layer (``MambaLayer``), called as it is.

    ======= =====================================================================================================
    slot    ``pre_dispatch_computation``
    stream  compute
    input   hidden states ``[s, b, h]``
    output  hidden states ``[s, b, h]``
    frees   nothing: the input is the residual
    wgrad   its linear layers
    ======= =====================================================================================================

    Args:
        layer: the layer to run; it is not changed.

    Raises:
        UnsupportedLayerError: a layer class or configuration that is not handled.
    """

    slot = Slot.PRE_DISPATCH_COMPUTATION
    stream = StreamType.COMPUTE

    def __init__(self, layer: MambaLayer) -> None:
        check_layer(layer)
        self._layer: Any = layer

    def forward(self, ctx: NodeContext, *inputs: Tensor) -> Tensor | tuple[Tensor, ...]:
        (hidden,) = inputs
        chunk: Any = ctx.chunk_state
        if ctx.is_first_layer and not ctx.is_mtp:
            hidden = begin_decoder(chunk, hidden)
        with layer_rng(ctx, self._layer.config):
            output: Tensor = self._layer(
                hidden_states=hidden,
                attention_mask=chunk.attention_mask,
                inference_context=None,
                packed_seq_params=chunk.packed_seq_params,
            )
        if ctx.is_last_layer and not ctx.is_mtp:
            output = end_decoder(chunk, output)
        return output

    def own_deferred_parameters(self) -> tuple[Parameter, ...]:
        hook = self.wgrad_hook()
        if hook is not None and not isinstance(hook, ModulesHook):
            return tuple(hook.parameters())  # a user's
        return own_deferred_parameters(self._layer.config, self.modules())

    def wgrad_hook(self) -> WgradHook | None:
        return held_back_hook(self._layer)
