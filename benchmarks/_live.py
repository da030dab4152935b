"""Bytes of tensors that are alive.

A dispatch mode notes every storage that an operation makes, weakly: the bytes alive are those of all noted storages
that still exist, at the size that they have now (a plan may empty a storage that others still hold). Parameters, inputs
and what lives before the mode is entered do not count, nor does what a kernel needs for itself, nor the states of
generators, which Megatron-Core's tracker keeps and compares (5 kB each on a CPU). Collectives run on copies: the thread
of a gloo group lets go of a collective's tensors a moment after it is done, and that moment varies.
"""

from __future__ import annotations

from typing import Any, Self, final

import torch
from torch import Tensor
from torch._C._distributed_c10d import Work
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from layernodes.lane import tensors_in


@final
class LiveBytes(TorchDispatchMode):
    """Counts the bytes of storages that operations of this thread made and that are still alive.

    Attributes:
        peak: the most bytes that were alive after an operation.
    """

    def __init__(self) -> None:
        super().__init__()
        self._storages: dict[int, StorageWeakRef] = {}
        self._state_shape = torch.get_rng_state().shape
        self.peak = 0

    def __enter__(self) -> Self:
        """Count from here on."""
        super().__enter__()
        return self

    def now(self) -> int:
        """Bytes alive."""
        total = 0
        for key, ref in list(self._storages.items()):
            storage = torch.UntypedStorage._new_with_weak_ptr(ref.cdata)
            if storage is None:
                del self._storages[key]
            else:
                total += storage.nbytes()
        return total

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation and note what it made."""
        run = _on_copies if func.namespace == "c10d" else _directly
        result = run(func, args, kwargs or {})
        if not func.is_view:
            given = {t.untyped_storage()._cdata for t in tensors_in((args, kwargs or {}))}
            for tensor in tensors_in(result):
                if tensor.shape == self._state_shape and tensor.element_size() == 1:
                    continue
                storage = tensor.untyped_storage()
                if storage._cdata not in given and storage._cdata not in self._storages:
                    self._storages[storage._cdata] = StorageWeakRef(storage)
        self.peak = max(self.peak, self.now())
        return result


def _directly(func: Any, args: Any, kwargs: Any) -> Any:
    return func(*args, **kwargs)


def _on_copies(func: Any, args: Any, kwargs: Any) -> Any:
    """Run a collective on copies of its tensors, to its end, and return its work."""
    copies: dict[int, tuple[Tensor, Tensor]] = {}

    def copy(tensor: Tensor) -> Tensor:
        return copies.setdefault(id(tensor), (tensor, tensor.clone()))[1]

    result = func(*tree_map_only(Tensor, copy, args), **kwargs)
    work = result[-1] if isinstance(result, tuple) else result
    Work.unbox(work).wait()
    for original, run_on in copies.values():
        original.copy_(run_on)
    return (*args[0:1], work) if isinstance(result, tuple) else work
