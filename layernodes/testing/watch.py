"""Sees what steps do to tensors and to objects: operations, storages that stay alive, attributes that change."""

from __future__ import annotations

import gc
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import Enum
from typing import Any, Final, NamedTuple, final

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import Module
from torch.utils._python_dispatch import TorchDispatchMode

from layernodes._megatron.training import WGRAD_WRAPPER
from layernodes.lane import tensors_in
from layernodes.plan.step import Step


class PlantedError(Exception):
    """What a ``Watch`` raises on demand."""


class _Made(NamedTuple):
    storage: StorageWeakRef
    address: int
    text: str


@final
class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]  # its __init_subclass__ is untyped in torch
    """Counts the operations of each step, holds what they make weakly, and raises at one of them on demand.

    Steps must run in the thread that entered it: on inline streams.

    Args:
        raise_at: text of a step, and the index of the operation in it that raises ``PlantedError``; None: none does.
    """

    def __init__(self, raise_at: tuple[str, int] | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # untyped in torch
        self.num_operations: Counter[str] = Counter()
        self._raise_at = raise_at
        self._step = "no step"
        self._made: list[_Made] = []
        self._addresses: set[int] = set()
        self._given: set[int] = set()  # storages that were there before

    def begin(self, step: Step) -> None:
        """A step begins; for ``Runner(before_step=...)``."""
        self._step = str(step)

    def end(self, step: Step) -> None:
        """It is over; for ``Runner(after_step=...)``."""
        self._step = "no step"

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Count, raise or run, and note what is made."""
        number = self.num_operations[self._step]
        self.num_operations[self._step] += 1
        if self._raise_at == (self._step, number):
            raise PlantedError(f"planted at operation {number} of {self._step}, {func}")
        made = self._addresses
        self._given |= {storage._cdata for storage in _storages([args, kwargs or {}])} - made
        result = func(*args, **(kwargs or {}))
        for tensor in tensors_in(result):
            for storage in _storages(tensor):
                if storage._cdata in made or storage._cdata in self._given:
                    continue
                text = f"a tensor {list(tensor.shape)} made in {self._step} by {func}"
                made.add(storage._cdata)
                reference = StorageWeakRef(storage)  # type: ignore[no-untyped-call]  # untyped in torch
                self._made.append(_Made(reference, storage._cdata, text))
        return result

    def alive(self, owners: Mapping[str, object]) -> list[str]:
        """What was made under this watch and is still alive, buffers of modules aside, with who holds it.

        Args:
            owners: objects, by the names that messages call them, among whose attributes the holder is looked for.
        """
        modules = [owner for owner in owners.values() if isinstance(owner, Module)]
        lasting = {b.untyped_storage()._cdata for module in modules for b in module._buffers.values() if b is not None}
        holders = {
            storage._cdata: f"{name}.{attribute}"
            for name, owner in owners.items()
            for attribute, value in vars(owner).items()
            for storage in _storages(list(value) if isinstance(value, set | deque) else value)
        }
        found: dict[int, str] = {}
        for made in self._made:
            if made.address in lasting:
                continue
            if not made.storage.expired():  # type: ignore[no-untyped-call]  # untyped in torch
                holder = holders.get(made.address)
                found.setdefault(made.address, made.text + (f", held by {holder}" if holder else ""))
        return list(found.values())


def _storages(value: object) -> Iterator[torch.UntypedStorage]:
    for tensor in tensors_in(value):
        if tensor.layout is torch.strided and tensor.numel() > 0:
            yield tensor.untyped_storage()


_PLAIN: Final = (bool, int, float, complex, str, bytes, Enum, type(None))
_CONTAINERS: Final = (list, tuple, set, frozenset, deque)

Attributes = dict[str, object]
"""A fingerprint of each attribute, by its name."""


def attributes(owners: Mapping[str, object]) -> Attributes:
    """What the attributes of objects are now; gradients and buffers, which runs change, aside."""
    return {
        f"{name}.{attribute}": _fingerprint(value)
        for name, owner in owners.items()
        for attribute, value in vars(owner).items()
        if not (isinstance(owner, Module) and attribute in ("_buffers", WGRAD_WRAPPER))
    }


def changed(before: Attributes, after: Attributes) -> set[str]:
    """Names of the attributes that differ, came or went."""
    return {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}


def _fingerprint(value: object) -> object:
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, Tensor):
        return id(value), value._version
    if isinstance(value, Mapping):
        return id(value), tuple((repr(key), _shallow(item)) for key, item in value.items())
    if isinstance(value, _CONTAINERS):
        return id(value), tuple(map(_shallow, value))
    return id(value)


def _shallow(value: object) -> object:
    if isinstance(value, _PLAIN):
        return value
    return (id(value), value._version) if isinstance(value, Tensor) else id(value)


def owners_of(nodes: Iterable[tuple[str, object]], layers: Iterable[tuple[str, Module]]) -> dict[str, object]:
    """Nodes, and layers with all modules in them, by the names that messages call them."""
    named = dict(nodes)
    for name, layer in layers:
        named |= {f"{name}.{path}" if path else name: module for path, module in layer.named_modules()}
    return named


@contextmanager
def no_collection() -> Iterator[None]:
    """Collect no cycles, so that what would wait for a collection shows."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
