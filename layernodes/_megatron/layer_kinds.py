"""Which kind of layer a module is."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from enum import Enum
from typing import Any

from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionLayer
from megatron.core.transformer.transformer_layer import TransformerLayer

from layernodes._megatron.support import check_layer


class LayerKind(Enum):
    """The kinds of layer that have nodes of their own, and ``OTHER`` for a user's."""

    DENSE = "dense"
    MOE = "moe"
    MTP_DENSE = "dense, in MTP"
    MTP_MOE = "moe, in MTP"
    OTHER = "other"

    @property
    def is_moe(self) -> bool:
        """Whether the layer dispatches tokens to experts."""
        return self in (LayerKind.MOE, LayerKind.MTP_MOE)

    @property
    def is_mtp(self) -> bool:
        """Whether it is a multi-token-prediction layer."""
        return self in (LayerKind.MTP_DENSE, LayerKind.MTP_MOE)


def kind_of(layer: Any, *, has_nodes: bool) -> LayerKind:
    """The kind of ``layer``; UnsupportedLayerError where it is not Megatron-Core's and no nodes are given for it."""
    if has_nodes and not isinstance(layer, TransformerLayer | MultiTokenPredictionLayer):
        return LayerKind.OTHER
    check_layer(layer)
    if isinstance(layer, MultiTokenPredictionLayer):
        return LayerKind.MTP_MOE if isinstance(layer.mtp_model_layer.mlp, MoELayer) else LayerKind.MTP_DENSE
    return LayerKind.MOE if isinstance(layer.mlp, MoELayer) else LayerKind.DENSE


def moe_metadata(layer: Any) -> tuple[bool, int | None]:
    """``(is_moe, num_local_experts)``, as Megatron-Core's ``get_layer_moe_metadata`` returns."""
    inner = layer.mtp_model_layer if isinstance(layer, MultiTokenPredictionLayer) else layer
    check_layer(layer)
    moe = inner.mlp
    return (True, moe.num_local_experts) if isinstance(moe, MoELayer) else (False, None)


def precision_context(layer: Any) -> Callable[[], AbstractContextManager[Any]] | None:
    """What makes the low-precision context under which each forward slot of ``layer`` runs; None where there is
    none."""
    config = layer.config
    return layer.get_inner_quantization_context if config.fp8 or config.fp4 else None
