"""Which submodules of a layer each slot runs, and whether it touches random generators."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from torch.nn import Module

from layernodes._megatron.layer import LayerParts
from layernodes.slots import Slot

_ROUTER_DRAWS: Final = (
    "moe_input_jitter_eps",
    "moe_router_force_load_balancing",
    "moe_router_force_biased",
)
"""Configuration fields under which the router draws random numbers."""


def slot_modules(parts: LayerParts, slot: Slot) -> tuple[Module, ...]:
    """The submodules whose parameters ``slot`` uses; over the slots, each parameter of the layer exactly once."""
    return tuple(module for module in _SLOTS[slot](parts) if module is not None)


def slot_touches_rng(parts: LayerParts, slot: Slot) -> bool:
    """Whether the slot may draw from, fork or restore a generator, forward or backward (a recompute restores it).

    Whether the layer trains now plays no part: a plan outlives ``train()`` and ``eval()``.
    """
    config, layer = parts.config, parts.layer
    if slot in (Slot.MOE_DISPATCH, Slot.MTP_POST_PROCESS):
        return False
    if config.recompute_granularity is not None:
        return True
    hidden_dropout = layer.hidden_dropout > 0
    if slot in (Slot.MOE_COMBINE, Slot.POST_COMBINE):
        return bool(hidden_dropout or config.sequence_parallel)
    attention = slot is Slot.PRE_DISPATCH_COMPUTATION
    drawn = attention and (config.attention_dropout > 0 or any(getattr(config, name, None) for name in _ROUTER_DRAWS))
    return bool(drawn or hidden_dropout or config.sequence_parallel or _has_dropout(slot_modules(parts, slot)))


def _has_dropout(modules: Iterable[Module]) -> bool:
    """Whether a module is a dropout of its own, whose rate the configuration does not tell."""
    return any(
        "dropout" in type(part).__name__.lower() and getattr(part, "p", 0) > 0
        for module in modules
        for part in module.modules()
    )


def _pre_dispatch(parts: LayerParts) -> list[Module | None]:
    layer, moe = parts.layer, parts.moe
    apart = {"mlp"} if moe is not None else {"mlp", "pre_mlp_layernorm", "mlp_bda"}
    modules: list[Module | None] = [child for name, child in layer.named_children() if name not in apart]
    if moe is not None:
        modules += [child for name, child in moe.named_children() if name not in ("experts", "fc2_latent_proj")]
    if parts.mtp is not None:
        inner = ("mtp_model_layer", "final_layernorm")
        modules += [child for name, child in parts.mtp.named_children() if name not in inner]
    return modules


def _mlp(parts: LayerParts) -> list[Module | None]:
    if parts.moe is not None:
        return [parts.moe.experts]
    return [child for name, child in parts.layer.named_children() if name in ("mlp", "pre_mlp_layernorm", "mlp_bda")]


def _latent(parts: LayerParts) -> list[Module | None]:
    return [getattr(parts.moe, "fc2_latent_proj", None)]


def _nothing(_: LayerParts) -> list[Module | None]:
    return []


def _mtp_post(parts: LayerParts) -> list[Module | None]:
    return [parts.mtp.final_layernorm] if parts.mtp is not None else []


_SLOTS = {
    Slot.PRE_DISPATCH_COMPUTATION: _pre_dispatch,
    Slot.MOE_DISPATCH: _nothing,
    Slot.MLP: _mlp,
    Slot.MOE_COMBINE: _latent,
    Slot.POST_COMBINE: _latent,
    Slot.MTP_POST_PROCESS: _mtp_post,
}
