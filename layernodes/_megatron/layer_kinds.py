"""Which kind of layer a module is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from enum import Enum
from functools import partial
from typing import Any, Final

from megatron.core.enums import Fp8Recipe
from megatron.core.fp4_utils import get_fp4_context
from megatron.core.fp8_utils import get_fp8_context
from megatron.core.models.hybrid.hybrid_block import HybridStack
from megatron.core.ssm.mamba_layer import MambaLayer
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionLayer
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer

from layernodes._megatron.support import check_layer


class LayerKind(Enum):
    """The kinds of layer that have nodes of their own, and ``OTHER`` for a user's."""

    DENSE = "dense"
    MOE = "moe"
    ATTENTION = "attention"
    MLP = "mlp"
    MIXER = "mixer"
    MTP_DENSE = "dense, in MTP"
    MTP_MOE = "moe, in MTP"
    MTP_STACK = "stack, in MTP"
    OTHER = "other"

    @property
    def is_moe(self) -> bool:
        """Whether the layer dispatches tokens to experts."""
        return self in (LayerKind.MOE, LayerKind.MTP_MOE)

    @property
    def is_mtp(self) -> bool:
        """Whether it is a multi-token-prediction layer."""
        return self in (LayerKind.MTP_DENSE, LayerKind.MTP_MOE, LayerKind.MTP_STACK)


def kind_of(layer: Any, *, has_nodes: bool) -> LayerKind:
    """The kind of ``layer``; UnsupportedLayerError where it is not Megatron-Core's and no nodes are given for it."""
    kind = next((_KINDS[base] for base in type(layer).__mro__ if base in _KINDS), None)
    if has_nodes and kind is None:
        return LayerKind.OTHER
    check_layer(layer)
    assert kind is not None
    return kind(layer)


def moe_metadata(layer: Any) -> tuple[bool, int | None]:
    """``(is_moe, num_local_experts)``, as Megatron-Core's ``get_layer_moe_metadata`` returns."""
    inner = layer.mtp_model_layer if isinstance(layer, MultiTokenPredictionLayer) else layer
    check_layer(layer)
    moe = getattr(inner, "mlp", None)
    return (True, moe.num_local_experts) if isinstance(moe, MoELayer) else (False, None)


def precision_context(layer: Any) -> Callable[[], AbstractContextManager[Any]] | None:
    """What makes the low-precision context under which each forward slot of ``layer`` runs; None where there is
    none.

    In Megatron-Core the block enters it around each of its layers; here whatever runs a plan stands in the block's
    place, with a model or without one. Delayed scaling has one around the whole run: ``ModelChunk.run_context``.
    """
    config = getattr(layer, "config", None)
    if not isinstance(config, TransformerConfig) or not (config.fp8 or config.fp4):
        return None
    if config.fp8 and config.fp8_recipe == Fp8Recipe.delayed:
        return None
    own: Callable[[], AbstractContextManager[Any]] | None = getattr(layer, "get_inner_quantization_context", None)
    if own is not None:
        return own
    number = getattr(layer, "layer_number", 0)  # one's own layer may have none; it is then no first or last one in bf16
    return partial(get_fp8_context if config.fp8 else get_fp4_context, config, number - 1)


def inner_layers(layer: Any) -> tuple[Any, ...]:
    """The layers of the stack inside a multi-token-prediction layer of kind ``MTP_STACK``."""
    return tuple(layer.mtp_model_layer.layers)


def _of_transformer_layer(layer: Any) -> LayerKind:
    if isinstance(layer.mlp, MoELayer):
        return LayerKind.MOE
    if isinstance(layer.mlp, IdentityOp):
        return LayerKind.ATTENTION
    return LayerKind.MLP if isinstance(layer.self_attention, IdentityOp) else LayerKind.DENSE


def _of_mtp_layer(layer: Any) -> LayerKind:
    inner = layer.mtp_model_layer
    if isinstance(inner, HybridStack):
        return LayerKind.MTP_STACK
    return LayerKind.MTP_MOE if isinstance(inner.mlp, MoELayer) else LayerKind.MTP_DENSE


def _of_mixer(_: Any) -> LayerKind:
    return LayerKind.MIXER


_KINDS: Final[Mapping[type, Callable[[Any], LayerKind]]] = {
    TransformerLayer: _of_transformer_layer,
    MultiTokenPredictionLayer: _of_mtp_layer,
    MambaLayer: _of_mixer,
}
"""Megatron-Core's layer classes, subclasses included; those of users are in a ``LayerRegistry``."""
