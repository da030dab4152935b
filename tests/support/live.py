"""Which tensors are alive.

Live bytes are counted by a dispatch mode that notes every storage an operation makes, weakly, once: the bytes alive
after an operation are those of all noted storages that still exist. Parameters, inputs and what lives before the mode
is entered do not count, nor does what never passes through the dispatcher.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Self

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from layernodes.lane import tensors_in
from layernodes.testing.watch import no_collection


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of storages that operations made and that are still alive; keeps the peak."""

    def __init__(self) -> None:
        super().__init__()
        self._storages: dict[int, tuple[StorageWeakRef, Any]] = {}
        self.peak = 0

    def __enter__(self) -> Self:
        """Count from here on."""
        super().__enter__()
        return self

    def now(self) -> int:
        """Bytes alive."""
        for key, (ref, _) in list(self._storages.items()):
            if ref.expired():
                del self._storages[key]
        return sum(storage().nbytes() for _, storage in self._storages.values())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation and note what it made."""
        result = func(*args, **(kwargs or {}))
        if not func.is_view:
            given = {t.untyped_storage()._cdata for t in tensors_in((args, kwargs or {}))}
            for tensor in tensors_in(result):
                storage = tensor.untyped_storage()
                if storage._cdata not in given and storage._cdata not in self._storages:
                    self._storages[storage._cdata] = (StorageWeakRef(storage), _sized(tensor))
        self.peak = max(self.peak, self.now())
        return result


def _sized(tensor: Tensor) -> Any:
    """Something that tells a storage's size now without keeping it."""
    ref = weakref.ref(tensor)
    nbytes = tensor.untyped_storage().nbytes()

    class Size:
        def nbytes(self) -> int:
            alive = ref()
            return nbytes if alive is None else alive.untyped_storage().nbytes()

    return Size


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
