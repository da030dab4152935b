"""Which class of chunk stands for a model: one place for all model classes that are handled."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from megatron.core.models.gpt import GPTModel
from megatron.core.models.hybrid.hybrid_model import HybridModel
from torch.nn import Module

from layernodes._megatron.chunk import GPTChunk, ModelChunk
from layernodes._megatron.hybrid import HybridChunk
from layernodes._megatron.wrappers import unwrap

CHUNKS: Final[Mapping[type[Module], type[ModelChunk]]] = {GPTModel: GPTChunk, HybridModel: HybridChunk}
"""The chunk class of each model class, its subclasses included."""


def chunk_of(model: Module) -> ModelChunk:
    """The chunk of a model, possibly wrapped in Megatron-Core's ``Float16Module`` or ``DistributedDataParallel``.

    Raises:
        UnsupportedLayerError: it is, or wraps, something else; a wrapper or a ``forward`` of another kind, which would
            not be called.
    """
    chunk = unchecked_chunk_of(model)
    chunk.check()
    return chunk


def unchecked_chunk_of(model: Module) -> ModelChunk:
    """``chunk_of`` without what ``ModelChunk.check`` refuses."""
    inner, is_float16 = unwrap(model, tuple(CHUNKS))
    found = next(CHUNKS[base] for base in type(inner).__mro__ if base in CHUNKS)
    return found(inner, is_float16=is_float16)
