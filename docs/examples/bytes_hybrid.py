"""The same small byte-level model as a ``HybridModel``: attention, MoE and MLP layers in a pattern.

Nothing here knows of layernodes. The layers are Megatron-Core's local ones, which run on a CPU; where there is a GPU,
the stack's final norm needs Transformer Engine.
"""

from __future__ import annotations

from argparse import Namespace

from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_submodules
from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.ssm.mlp_layer import MLPLayer
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.transformer.multi_token_prediction import (
    MultiTokenPredictionBlock,
    MultiTokenPredictionBlockSubmodules,
    MultiTokenPredictionLayer,
    MultiTokenPredictionLayerSubmodules,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import (
    MoETransformerLayer,
    TransformerLayer,
    TransformerLayerSubmodules,
)


def layer_pattern(options: Namespace) -> str:
    """The pattern of all pipeline stages: as given, or attention and experts, ``options.layers`` times."""
    if options.pattern:
        return options.pattern
    stages = options.pp * (options.vpp or 1)
    if options.layers % stages:
        raise SystemExit(
            f"--layers {options.layers} does not divide by {stages} stages; give --pattern, with | between"
        )
    return "|".join(["*E" * (options.layers // stages)] * stages)


def num_layers(options: Namespace) -> int:
    """Layers of the pattern: what ``TransformerConfig.num_layers`` counts."""
    return len(layer_pattern(options).replace("|", ""))


def build_hybrid(config: TransformerConfig, options: Namespace, **arguments: object) -> HybridModel:
    """One chunk of the model; ``arguments`` are those that every model class takes."""
    pattern = layer_pattern(options) + ("/*E" if options.mtp else "")
    spec = stack_spec(config)
    return HybridModel(config=config, hybrid_stack_spec=spec, hybrid_layer_pattern=pattern, **arguments)


def stack_spec(config: TransformerConfig) -> ModuleSpec:
    """A stack of local modules for ``*``, ``E`` and ``-``."""
    dense = get_gpt_layer_local_submodules(normalization=config.normalization)
    moe = get_gpt_layer_local_submodules(num_experts=config.num_moe_experts, normalization=config.normalization)
    attention = TransformerLayerSubmodules(
        input_layernorm=dense.input_layernorm, self_attention=dense.self_attention, self_attn_bda=get_bias_dropout_add
    )
    norm = WrappedTorchNorm
    mtp_layer = MultiTokenPredictionLayerSubmodules(
        enorm=norm, hnorm=norm, layer_norm=norm, eh_proj=ColumnParallelLinear, mtp_model_layer=None
    )
    mtp_spec = ModuleSpec(module=MultiTokenPredictionLayer, submodules=mtp_layer)
    return ModuleSpec(
        module=HybridStack,
        submodules=HybridStackSubmodules(
            attention_layer=ModuleSpec(module=TransformerLayer, submodules=attention),
            mlp_layer=ModuleSpec(module=MLPLayer, submodules=_feed_forward(dense)),
            moe_layer=ModuleSpec(module=MoETransformerLayer, submodules=_feed_forward(moe)),
            mtp_block_spec=ModuleSpec(
                module=MultiTokenPredictionBlock,
                submodules=MultiTokenPredictionBlockSubmodules(layer_specs=[mtp_spec]),
            ),
        ),
    )


def _feed_forward(whole: TransformerLayerSubmodules) -> TransformerLayerSubmodules:
    return TransformerLayerSubmodules(
        pre_mlp_layernorm=whole.pre_mlp_layernorm, mlp=whole.mlp, mlp_bda=get_bias_dropout_add
    )
