"""What a lane's memory needs to be told: which tensors work of the lane uses, and which storages it gives back.

An accelerator hands a freed storage out again at once on the stream that it came from; whoever used it on another
stream must have said so. On a CPU there is nothing to say, and steps are given no lane.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Protocol, final, runtime_checkable

import torch
from torch import Tensor


class Lane(Protocol):
    """One of the two lanes of a run, as its steps see it."""

    def uses(self, value: object) -> None:
        """Work of this lane uses the tensors in ``value``, wherever they come from."""
        ...

    def may_use(self, value: object) -> None:
        """Work of this lane may use the tensors in ``value``, which stay alive until both lanes are done."""
        ...

    def releases(self, tensor: Tensor) -> None:
        """Work of this lane was the last to use the storage of ``tensor``; it goes back to the allocator."""
        ...


@runtime_checkable
class HoldsTensors(Protocol):
    """A handoff that holds tensors where ``tensors_in`` does not look for them."""

    def tensors(self) -> Iterator[Tensor]:
        """All of them."""
        ...


def tensors_in(value: object) -> Iterator[Tensor]:
    """The tensors in a value: itself, or those in a mapping, list, tuple or dataclass, at any depth."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, HoldsTensors) and not isinstance(value, type):
        yield from value.tensors()
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            yield from tensors_in(getattr(value, field.name))


@final
class DeviceLane:
    """The lane of an accelerator's stream."""

    __slots__ = ("stream",)

    def __init__(self, stream: torch.Stream) -> None:
        self.stream = stream

    def uses(self, value: object) -> None:
        """See ``Lane.uses``."""
        kind = self.stream.device.type
        for tensor in tensors_in(value):
            if tensor.device.type == kind:
                tensor.record_stream(self.stream)

    def may_use(self, value: object) -> None:
        """Nothing to do: the lanes are joined before such tensors can be freed."""

    def releases(self, tensor: Tensor) -> None:
        """See ``Lane.releases``."""
        self.uses(tensor)
        empty_storage(tensor)


def accelerator_with_streams() -> torch.device | None:
    """The accelerator at hand, if work can be put on two streams of it; None for Apple's, which has one."""
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return None if accelerator is None or accelerator.type == "mps" else accelerator


def empty_storage(tensor: Tensor) -> None:
    """Give the storage of ``tensor`` back; whoever shares it is left with an empty one."""
    tensor.untyped_storage().resize_(0)
