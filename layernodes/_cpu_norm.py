"""The norm that ``HybridStack`` makes itself, without Transformer Engine."""

from __future__ import annotations

from typing import Any

import torch

from layernodes.errors import UnsupportedLayerError


def host_norm(config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> torch.nn.Module:
    """``TENorm`` in plain torch: LayerNorm or RMSNorm, its parameters marked as Transformer Engine's are.

    Raises:
        UnsupportedLayerError: another normalization, or zero-centered weights.
    """
    kinds = {"LayerNorm": torch.nn.LayerNorm, "RMSNorm": torch.nn.RMSNorm}
    if config.normalization not in kinds:
        raise UnsupportedLayerError(
            f"the CPU host has no final norm of kind {config.normalization!r}; use LayerNorm or RMSNorm",
            field="normalization",
            value=config.normalization,
        )
    if config.layernorm_zero_centered_gamma:
        raise UnsupportedLayerError(
            "the CPU host has no zero-centered final norm; set layernorm_zero_centered_gamma=False",
            field="layernorm_zero_centered_gamma",
            value=True,
        )
    norm: torch.nn.Module = kinds[config.normalization](hidden_size, eps=eps, dtype=config.params_dtype)
    for parameter in norm.parameters():
        vars(parameter)["sequence_parallel"] = config.sequence_parallel
    return norm
