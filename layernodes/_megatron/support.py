"""Refuses, before anything runs, what the split path would not do as the plain layer does."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NoReturn

import torch
from megatron.core.enums import Fp8Recipe
from megatron.core.models.hybrid.hybrid_block import HybridStack
from megatron.core.ssm.mamba_layer import MambaLayer
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionLayer
from megatron.core.transformer.transformer_layer import MoETransformerLayer, TransformerLayer

from layernodes._megatron.overrides import check_block, check_override
from layernodes._megatron.wrappers import check_unsharded
from layernodes.errors import UnsupportedLayerError

# What a decoder call may be given beside its usual arguments (``extra_block_kwargs``) and the split path passes on.
_EXTRA_BLOCK_KWARGS = frozenset({"attention_bias"})


def check_layer(layer: Any) -> None:
    """Raise UnsupportedLayerError, naming field and value, where ``layer`` is not handled."""
    check_unsharded(layer)
    if isinstance(layer, MultiTokenPredictionLayer):
        inner = getattr(layer, "mtp_model_layer", None)
        if isinstance(inner, HybridStack):
            _check_mtp_methods(layer)
            _check_stack(layer, inner)
            return
        if not isinstance(inner, TransformerLayer):
            raise UnsupportedLayerError(
                f"a MultiTokenPredictionLayer over {type(inner).__name__} is not handled; its inner layer "
                f"(mtp_model_layer) must be a TransformerLayer or a HybridStack",
                field="mtp_model_layer",
                value=type(inner),
            )
        _check_mtp_methods(layer)
        layer = inner
    if isinstance(layer, MambaLayer):
        _check_fp8_recipe(layer)
        return
    if not isinstance(layer, TransformerLayer):
        name = type(layer).__name__
        if isinstance(layer, MegatronModule) and hasattr(layer, "decoder"):
            raise UnsupportedLayerError(
                f"{name} is a model, and a plan is of one layer; give one of model.decoder.layers, or plan it with "
                f"ChunkPlan.build(model)",
                field="layer",
                value=type(layer),
            )
        raise UnsupportedLayerError(
            f"{name} is no TransformerLayer and no MultiTokenPredictionLayer or MambaLayer; pass one of these, or name "
            f"a node for every slot that the layer uses: LayerPlan.build(layer, nodes={{Slot.MLP: MyNode, ...}}), "
            f"or for all layers of the class: registry.register({name}, {{Slot.MLP: MyNode, ...}}) on a LayerRegistry "
            f"that you give as registry=",
            field="layer",
            value=type(layer),
        )
    check_override(layer, "forward", TransformerLayer)
    if not isinstance(layer.cross_attention, IdentityOp):
        raise UnsupportedLayerError(
            f"layer {layer.layer_number} has cross-attention ({type(layer.cross_attention).__name__}), which is not "
            f"handled; use a decoder-only layer spec",
            field="cross_attention",
            value=type(layer.cross_attention),
        )
    _check_fp8_recipe(layer)
    if isinstance(layer.mlp, MoELayer):
        _check_moe_layer(layer)


def notes_on(layer: Any) -> tuple[str, ...]:
    """What the split path does otherwise than the plain layer without changing a number."""
    inner = getattr(layer, "mtp_model_layer", layer)
    config = inner.config
    mlp = getattr(inner, "mlp", None)
    notes: list[str] = []
    if config.recompute_granularity == "full":
        notes.append("full recompute is not done: a layer's slots keep what their backward needs")
    elif isinstance(mlp, MoELayer) and mlp.moe_layer_recompute:
        notes.append(
            "recompute of 'moe' is not done: it would exchange tokens again; recompute 'moe_act', 'layernorm' instead"
        )
    if config.cpu_offloading:
        notes.append("cpu_offloading is not done: what a slot's backward needs stays on the device")
    return tuple(notes)


def check_block_kwargs(extra_block_kwargs: dict[str, Any] | None) -> None:
    """Raise UnsupportedLayerError for arguments to the decoder that its layers would not be given."""
    unknown = {name: value for name, value in (extra_block_kwargs or {}).items() if value is not None}
    for name in sorted(unknown.keys() - _EXTRA_BLOCK_KWARGS):
        raise UnsupportedLayerError(
            f"extra_block_kwargs[{name!r}] is not passed on to the layers of a schedule plan; "
            f"handled are: {', '.join(sorted(_EXTRA_BLOCK_KWARGS))}",
            field=f"extra_block_kwargs.{name}",
            value=unknown[name],
        )


def check_padding_mask(padding_mask: Any, layers: Iterable[Any]) -> None:
    """Raise UnsupportedLayerError for a padding mask that the plain layer's router cannot take either; it counts
    tokens, and fails, with gradients only."""
    if padding_mask is None or not torch.is_grad_enabled():
        return
    for layer in layers:
        inner = getattr(layer, "mtp_model_layer", layer)
        router = getattr(getattr(inner, "mlp", None), "router", None)
        if getattr(router, "enable_expert_bias", False):
            raise UnsupportedLayerError(
                "a router with expert bias cannot take a padding mask, the plain layer fails on it too (it "
                "combines a map of [tokens, experts] with a mask of [tokens]); leave padding_mask out, or switch "
                "moe_router_enable_expert_bias off",
                field="moe_router_enable_expert_bias",
                value=True,
            )


def check_recomputed_norms(model: Any, given: Any) -> None:
    """Raise UnsupportedLayerError for a recomputed norm to whose input no gradient flows, in a model's decoder.

    Megatron-Core's recompute then has nothing to run on: the plain model fails too, in the middle of its backward.

    Args:
        model: the model chunk.
        given: the hidden states that it is given instead of embedding tokens; None where it is given none.
    """
    if not torch.is_grad_enabled():
        return
    if _trains(model.embedding) if model.pre_process and given is None else given is None or given.requires_grad:
        return
    for layer in model.decoder.layers:
        if not isinstance(layer, TransformerLayer):
            if _trains(layer):
                return
            continue
        for norm, recomputes, user in (
            ("input_layernorm", layer.recompute_input_layernorm, layer.self_attention),
            ("pre_mlp_layernorm", layer.recompute_pre_mlp_layernorm, layer.mlp),
        ):
            if recomputes and _trains(user):
                raise UnsupportedLayerError(
                    f"layer {layer.layer_number} recomputes its {norm}, to whose input no gradient flows, since all "
                    f"parameters before it are frozen; the plain layer fails on it too: take 'layernorm' out of "
                    f"recompute_modules, or train the embedding",
                    field="recompute_modules",
                    value=layer.config.recompute_modules,
                )
            if _trains(user) or (not recomputes and _trains(getattr(layer, norm))):
                return


def _trains(module: Any) -> bool:
    return any(parameter.requires_grad for parameter in module.parameters())


def _check_fp8_recipe(layer: Any) -> None:
    if layer.config.fp8 and layer.config.fp8_recipe == Fp8Recipe.delayed:
        raise UnsupportedLayerError(
            f"fp8_recipe={Fp8Recipe.delayed.value!r} updates its scales once for the whole decoder, which no slot "
            f"could do in its place; use another recipe, such as 'tensorwise' or 'mxfp8'",
            field="fp8_recipe",
            value=layer.config.fp8_recipe,
        )


def _check_mtp_methods(layer: MultiTokenPredictionLayer) -> None:
    for method in ("forward", "_proj_and_transformer_layer"):
        check_override(layer, method, MultiTokenPredictionLayer)


def _check_stack(layer: MultiTokenPredictionLayer, stack: HybridStack) -> None:
    """The stack inside an MTP layer; its layers are checked when their plans are built."""
    check_block(stack)
    if layer.config.fp8 or layer.config.fp4:
        field = "fp8" if layer.config.fp8 else "fp4"
        raise UnsupportedLayerError(
            f"{field} inside a multi-token-prediction layer over a HybridStack is not handled: it nests two "
            f"low-precision contexts there; leave MTP out of the layer pattern, or switch {field} off",
            field=field,
            value=getattr(layer.config, field),
        )


def _check_moe_layer(layer: TransformerLayer) -> None:
    moe, config = layer.mlp, layer.config
    check_override(moe, "forward", MoELayer)
    check_override(layer, "_forward_mlp", TransformerLayer, MoETransformerLayer)
    if layer.training and not trains_in_parallel(layer):
        refuse_training(layer)
    if config.moe_latent_size and moe.use_shared_expert and moe.shared_expert_overlap:
        raise UnsupportedLayerError(
            "latent MoE cannot overlap its shared experts in training, the plain layer refuses it too; "
            "set moe_shared_expert_overlap=False",
            field="moe_shared_expert_overlap",
            value=config.moe_shared_expert_overlap,
        )


def trains_in_parallel(layer: TransformerLayer) -> bool:
    """Whether a MoE layer may be trained with the tensor parallelism that it has."""
    return layer.mlp.attn_tp_group.size() == 1 or bool(layer.config.sequence_parallel)


def refuse_training(layer: TransformerLayer) -> NoReturn:
    """Raise UnsupportedLayerError for a MoE layer that is not ``trains_in_parallel``."""
    raise UnsupportedLayerError(
        "a MoE layer with tensor parallelism cannot be trained without sequence parallelism, the plain "
        "layer refuses it too; set sequence_parallel=True",
        field="sequence_parallel",
        value=layer.config.sequence_parallel,
    )
