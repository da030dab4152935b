"""Measures the bytes that each step of a chunk leaves behind.

Definition: one microbatch runs under a schedule in which nothing overlaps, and the live bytes ``held[i]`` are read
after each step ``i``, in the order in which the host allocates and frees::

    F    activation_bytes = held[i] - held[i - 1]    what it keeps, its output included, less the inputs it let go
    W    wgrad_bytes      = held[i - 1] - held[i]    what waited for it

A difference below zero counts as zero. Gradients of parameters must exist beforehand, or the first ``W`` seems to keep
them. On an accelerator, live bytes are those that torch's allocator has handed out; on a CPU, which has no such count,
they are the storages that operations made and that still exist.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, final

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from layernodes.lane import tensors_in
from layernodes.plan.chunk_plan import ChunkPlan
from layernodes.plan.runner import Runner
from layernodes.plan.schedule import Schedule
from layernodes.plan.step import Step
from layernodes.slots import Phase


def measure_held_bytes(chunk: ChunkPlan, schedule: Schedule, batch: Any, loss_grad: Any) -> Mapping[Step, int]:
    """Bytes that each ``F`` keeps, and that wait for each ``W``; every ``B`` has 0.

    Args:
        chunk: the chunk; it has run before, so that gradients and caches are there.
        schedule: one microbatch, in an order in which nothing overlaps.
        batch, loss_grad: as of ``Runner.run``.

    Raises:
        StepError: a step raised.
    """
    now, counting = _live_bytes_of(chunk)
    held: dict[Step, int] = {}

    def after_step(step: Step) -> None:
        held[step] = now()

    with Runner("inline", after_step=after_step) as runner, counting:
        start = now()
        runner.run(schedule, chunk, [batch], [loss_grad])
    found, before = {}, start
    for step in schedule:
        after = held.get(step, before)
        change = {Phase.F: after - before, Phase.B: 0, Phase.W: before - after}[step.phase]
        found[step] = max(change, 0)
        before = after
    return found


def _live_bytes_of(chunk: ChunkPlan) -> tuple[Callable[[], int], AbstractContextManager[Any]]:
    """What tells the live bytes of the chunk's device, and what must be entered for it."""
    device = next((p.device for module in chunk.modules for p in module.parameters()), torch.device("cpu"))
    if device.type == "cpu":
        counter = LiveBytes()
        return counter.now, counter
    allocator = torch.get_device_module(device)
    return lambda: int(allocator.memory_allocated(device)), nullcontext()


@final
class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]  # its __init_subclass__ is untyped in torch
    """Counts the bytes of storages that operations made while it is entered and that are still alive.

    Every storage is noted weakly, once. Parameters, inputs and what lives before it is entered do not count, nor does
    what never passes through the dispatcher.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # untyped in torch
        self._storages: set[StorageWeakRef] = set()

    def now(self) -> int:
        """Bytes alive, at the sizes that storages have now."""
        alive = {ref: storage for ref in self._storages if (storage := _storage_of(ref)) is not None}
        self._storages = {*alive}
        return sum(storage.nbytes() for storage in alive.values())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation and note what it made."""
        result = func(*args, **(kwargs or {}))
        if not func.is_view:
            given = {_weak(tensor) for tensor in tensors_in((args, kwargs or {}))}
            self._storages |= {_weak(tensor) for tensor in tensors_in(result)} - given
        return result


def _weak(tensor: Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]  # untyped in torch


def _storage_of(ref: StorageWeakRef) -> torch.UntypedStorage | None:
    storage: torch.UntypedStorage | None = torch.UntypedStorage._new_with_weak_ptr(ref.cdata)
    return storage
