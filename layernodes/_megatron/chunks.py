"""Which class of chunk stands for a model: one place for all model classes that are handled."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from megatron.core.models.gpt import GPTModel
from megatron.core.models.hybrid.hybrid_model import HybridModel
from torch.nn import Module

from layernodes._megatron.chunk import GPTChunk, ModelChunk
from layernodes._megatron.hybrid import HybridChunk
from layernodes._megatron.wrappers import Unwrapped, unwrap

CHUNKS: Final[Mapping[type[Module], type[ModelChunk]]] = {GPTModel: GPTChunk, HybridModel: HybridChunk}
"""The chunk class of each model class, its subclasses included."""


def unwrapped(model: Module) -> Unwrapped:
    """The model in ``model``; UnsupportedLayerError as ``chunk_of``, and not for what the model itself is."""
    return unwrap(model, tuple(CHUNKS))


def chunk_of(model: Module) -> ModelChunk:
    """The chunk of a model, possibly wrapped in ``Float16Module`` or Megatron-Core's DistributedDataParallel.

    Raises:
        UnsupportedLayerError: it is, or wraps, something else; a wrapper or a ``forward`` of another kind, which would
            not be called.
    """
    inner, is_float16 = unwrapped(model)
    found = next(CHUNKS[base] for base in type(inner).__mro__ if base in CHUNKS)
    return found(inner, is_float16=is_float16)
