"""Which class of chunk stands for a model: one place for all model classes that are handled."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from megatron.core.models.gpt import GPTModel
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.transformer.module import Float16Module
from torch.nn import Module

from layernodes._megatron.chunk import GPTChunk, ModelChunk
from layernodes._megatron.hybrid import HybridChunk
from layernodes.errors import UnsupportedLayerError

CHUNKS: Final[Mapping[type[Module], type[ModelChunk]]] = {GPTModel: GPTChunk, HybridModel: HybridChunk}
"""The chunk class of each model class, its subclasses included."""


def chunk_of(model: Module) -> ModelChunk:
    """The chunk of a model, possibly wrapped in ``Float16Module`` or DistributedDataParallel.

    Raises:
        UnsupportedLayerError: it is, or wraps, something else.
    """
    is_float16 = False
    inner: Any = model
    while (found := _chunk_class(inner)) is None:
        is_float16 = is_float16 or isinstance(inner, Float16Module)
        inner = getattr(inner, "module", None)
        if not isinstance(inner, Module):
            raise UnsupportedLayerError(
                f"{type(model).__name__} is no GPTModel and no HybridModel and wraps none; pass a chunk of one of "
                f"these, or build the plans of your own layers with LayerPlan.build and join them with ChunkPlan.of",
                field="model",
                value=type(model),
            )
    return found(inner, is_float16=is_float16)


def _chunk_class(model: Any) -> type[ModelChunk] | None:
    return next((CHUNKS[base] for base in type(model).__mro__ if base in CHUNKS), None)
