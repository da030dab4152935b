"""Which tensors are alive; ``benchmarks._live`` counts the bytes of those that operations make."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from layernodes.testing.watch import no_collection


@contextmanager
def without_collection() -> Iterator[None]:
    """After one collection of cycles, none."""
    gc.collect()
    with no_collection():
        yield


def live() -> tuple[int, int]:
    """Number and bytes of all tensors that Python knows of."""
    tensors = [t for t in gc.get_objects() if type(t) in (Tensor, torch.nn.Parameter)]
    return len(tensors), sum(t.untyped_storage().nbytes() for t in tensors)
