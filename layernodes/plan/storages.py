"""What is known of a storage while steps are recorded: who made it, who used it, and which steps come after which.

Used by ``recording``, which states the rules.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from layernodes.lane import tensors_in
from layernodes.plan.program import Op
from layernodes.slots import Phase


class Mark(NamedTuple):
    """A step, and how far each lane had come before it could start (itself included)."""

    op: Op
    clock: tuple[int, int]

    @property
    def key(self) -> tuple[int, int]:
        """The slot of one microbatch that the step belongs to."""
        return self.op.run, self.op.place

    def comes_after(self, earlier: Mark) -> bool:
        """Whether this step cannot start before ``earlier`` is done."""
        return self.clock[earlier.op.lane] > earlier.op.index

    def may_read(self, maker: Mark, declared: set[tuple[int, int]]) -> bool:
        """Whether this step has been handed what ``maker`` made, or made it itself.

        What one backward recomputes for another of its layer goes through autograd's own graph.
        """
        if maker.key == self.key or self.key in declared:
            return True
        mine, other = self.op.step, maker.op.step
        if mine is None or other is None:
            return True  # a trainer's call reads what its passes made
        same_layer = (mine.microbatch, mine.layer) == (other.microbatch, other.layer)
        return same_layer and mine.phase is not Phase.F and other.phase is not Phase.F


class Storage:
    """What is known of one storage."""

    __slots__ = ("declared", "maker", "name", "number", "readers", "ref", "released_by", "used_on", "writer")

    def __init__(self, number: int, tensor: Tensor, maker: Mark | None, made_by: str) -> None:
        self.number = number
        self.ref = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]  # untyped in torch
        self.name = f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)} {made_by}"
        self.maker = maker
        self.writer = maker
        self.readers: list[Mark | None] = [None, None]
        self.used_on: set[int] = set()
        self.declared: set[tuple[int, int]] = set()
        self.released_by: Mark | None = None


def has_storage(tensor: Tensor) -> bool:
    """Whether a tensor has bytes that can be followed."""
    return tensor.layout is torch.strided and tensor.device.type != "meta" and tensor.numel() > 0


def accesses_of(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[tuple[Tensor, bool]]:
    """The tensors an operation is given, each with whether it writes there."""
    is_collective = func.namespace == "c10d"
    declared = func._schema.arguments
    given = [*zip(declared, args, strict=False), *((a, kwargs[a.name]) for a in declared if a.name in kwargs)]
    if kwargs.get("beta") == 0:
        given = given[1:]  # what a product would be added to is not read then: Megatron-Core passes a shared buffer
    for argument, value in given:
        if is_collective:
            writes = not argument.name.startswith("input")
        else:
            writes = argument.alias_info is not None and argument.alias_info.is_write
        for tensor in tensors_in(value):
            if has_storage(tensor):
                yield tensor, writes
