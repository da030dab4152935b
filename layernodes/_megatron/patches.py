"""The names in Megatron-Core that its own schedule plan looks up, and what ``install()`` puts there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from megatron.core.models.common import fine_grained_callables as common_callables
from megatron.core.models.common import utils as common_utils
from megatron.core.models.common.model_chunk_schedule_plan import (
    TransformerLayerSchedulePlan,
    TransformerModelChunkSchedulePlan,
)
from megatron.core.models.gpt import fine_grained_callables as gpt_callables

from layernodes._megatron.overrides import check_block, check_planned_model
from layernodes._megatron.plan_nodes import ChunkPostProcessNode, ChunkPreProcessNode, ProvingLayerNode
from layernodes._megatron.support import check_block_kwargs, check_padding_mask, check_recomputed_norms


class Patch(NamedTuple):
    """One attribute to replace."""

    owner: Any
    name: str
    value: Any


class Builders(NamedTuple):
    """The four functions of Megatron-Core's ``fine_grained_callables`` that are replaced."""

    build_transformer_layer_callables: Callable[..., Any]
    build_mtp_layer_callables: Callable[..., Any]
    build_layer_callables: Callable[..., Any]
    get_layer_moe_metadata: Callable[..., Any]


def schedule_plan_patches(builders: Builders) -> tuple[Patch, ...]:
    """Everything that makes Megatron-Core's own schedule plan run on our nodes."""
    return (
        Patch(gpt_callables, "build_transformer_layer_callables", builders.build_transformer_layer_callables),
        *(Patch(common_callables, name, getattr(builders, name)) for name in Builders._fields),
        Patch(common_utils, "TransformerLayerNode", ProvingLayerNode),
        Patch(common_utils, "PreProcessNode", ChunkPreProcessNode),
        Patch(common_utils, "PostProcessNode", ChunkPostProcessNode),
        Patch(TransformerModelChunkSchedulePlan, "_build_layer_schedule_plan", _build_layer_schedule_plan),
    )


def is_patched() -> bool:
    """Whether Megatron-Core's schedule plan runs on our nodes now."""
    return common_utils.TransformerLayerNode is ProvingLayerNode


def _build_layer_schedule_plan(
    self: TransformerModelChunkSchedulePlan, module: Any, comp_stream: Any, comm_stream: Any
) -> None:
    """As Megatron-Core's, and a repeated MTP layer runs ``mtp_num_layers`` times."""
    check_block_kwargs(self.state.extra_block_kwargs)
    if module is None:
        return
    model = self.state.model
    check_block(module)
    if module is model.decoder:
        check_planned_model(model)
        check_recomputed_norms(model, self.state.decoder_input if model.pre_process else module.input_tensor)
    layers = list(module.layers)
    check_padding_mask(self.state.padding_mask, layers)
    if getattr(module, "mtp_use_repeated_layer", False):
        layers = [layers[0]] * int(module.config.mtp_num_layers)
    plan_class = self.LAYER_SCHEDULE_PLAN_CLASS or TransformerLayerSchedulePlan
    for index, layer in enumerate(layers):
        extra_args = self._extra_args_for_layer(module, index, len(layers))
        self._transformer_layers.append(plan_class(layer, self.event, self.state, comp_stream, comm_stream, extra_args))
