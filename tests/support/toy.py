"""A layer of the tests' own in float64: four slots on two streams, one differentiable handoff, faults on demand."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import Linear, Module

from layernodes import ChunkPlan, ExtraSlot, LayerPlan, NodeContext, ScheduleNode, Slot, StreamType
from layernodes.state import HandoffMap
from tests.support.wire import wired

SLOTS = (Slot.PRE_DISPATCH_COMPUTATION, Slot.MOE_DISPATCH, Slot.MLP, Slot.MOE_COMBINE)


class Fuse:
    """Raises at one phase of one slot once it is armed; may also take its time."""

    def __init__(self) -> None:
        self.armed: tuple[str, Slot] | None = None
        self.error: type[BaseException] = ValueError
        self.seconds = 0.0

    def pass_by(self, phase: str, slot: Slot | ExtraSlot) -> None:
        """Raise if armed for this."""
        if self.seconds:
            time.sleep(self.seconds)
        if self.armed == (phase, slot):
            raise self.error("planted")

    def wired(self, x: Tensor, slot: Slot | ExtraSlot) -> Tensor:
        """The same value; its backward passes by."""
        return wired(x, partial(self.pass_by, "B", slot))


class Toy(Module):
    """Two linears; ``forward`` is the plain layer."""

    def __init__(self, size: int = 8, *, shared: Linear | None = None) -> None:
        super().__init__()
        self.first = shared or Linear(size, size, dtype=torch.float64)
        self.second = Linear(size, size, dtype=torch.float64)
        self.fuse = Fuse()

    def forward(self, x: Tensor) -> Tensor:
        wide = torch.tanh(self.first(x))
        return torch.sin(self.second(wide * 0.5 * 2.0)) * 1.5 + wide


class First(ScheduleNode):
    slot = Slot.PRE_DISPATCH_COMPUTATION
    stream = StreamType.COMPUTE
    writes: ClassVar[HandoffMap] = {"wide": Tensor}

    def __init__(self, layer: Toy) -> None:
        self.linear = layer.first
        self.fuse = layer.fuse

    def forward(self, ctx: NodeContext, *inputs: Tensor) -> Tensor:
        self.fuse.pass_by("F", Slot.PRE_DISPATCH_COMPUTATION)
        wide = torch.tanh(self.linear(inputs[0]))
        self.put(ctx, "wide", wide)
        return self.fuse.wired(wide * 0.5, self.slot)

    def touches_rng(self) -> bool:
        return False


class Send(ScheduleNode):
    slot = Slot.MOE_DISPATCH
    stream = StreamType.COMM

    def __init__(self, layer: Toy) -> None:
        self.fuse = layer.fuse

    def forward(self, ctx: NodeContext, *inputs: Tensor) -> Tensor:
        self.fuse.pass_by("F", Slot.MOE_DISPATCH)
        return self.fuse.wired(inputs[0] * 2.0, self.slot)

    def frees_input(self) -> bool:
        return True

    def touches_rng(self) -> bool:
        return False


class Middle(ScheduleNode):
    slot = Slot.MLP
    stream = StreamType.COMPUTE

    def __init__(self, layer: Toy) -> None:
        self.linear = layer.second
        self.fuse = layer.fuse

    def forward(self, ctx: NodeContext, *inputs: Tensor) -> Tensor:
        self.fuse.pass_by("F", Slot.MLP)
        return self.fuse.wired(torch.sin(self.linear(inputs[0])), self.slot)

    def frees_input(self) -> bool:
        return True

    def touches_rng(self) -> bool:
        return False


class Return(ScheduleNode):
    slot = Slot.MOE_COMBINE
    stream = StreamType.COMM
    reads: ClassVar[HandoffMap] = {"wide": Tensor}

    def __init__(self, layer: Toy) -> None:
        self.fuse = layer.fuse

    def forward(self, ctx: NodeContext, *inputs: Tensor) -> Tensor:
        self.fuse.pass_by("F", Slot.MOE_COMBINE)
        wide = self.take(ctx, "wide")
        assert isinstance(wide, Tensor)
        return self.fuse.wired(inputs[0] * 1.5 + wide, self.slot)

    def frees_input(self) -> bool:
        return True

    def touches_rng(self) -> bool:
        return False


NODES: dict[Any, Any] = dict(zip(SLOTS, (First, Send, Middle, Return), strict=True))


def toys(count: int = 2, **options: Any) -> list[Toy]:
    """Seeded layers."""
    torch.manual_seed(7)
    return [Toy(**options) for _ in range(count)]


def chunk_of(layers: Sequence[Toy], **nodes: Any) -> ChunkPlan:
    """Their chunk; ``nodes`` by slot name take the place of the usual ones."""
    chosen = {slot: nodes.get(slot.value, node) for slot, node in NODES.items()}
    return ChunkPlan.of([LayerPlan.build(layer, nodes=chosen) for layer in layers])


def inputs(count: int = 3) -> list[Tensor]:
    """Seeded leaves ``[6, 8]``."""
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(6, 8, generator=generator, dtype=torch.float64).requires_grad_() for _ in range(count)]


def plain(layers: Sequence[Toy], batches: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor], list[list[Tensor]]]:
    """Outputs, input gradients and, by microbatch, parameter gradients of the plain layers."""
    outputs, input_grads, grads = [], [], []
    parameters = list(dict.fromkeys(p for layer in layers for p in layer.parameters()))
    for batch in batches:
        leaf = value = batch.detach().requires_grad_()
        for layer in layers:
            value = layer(value)
        found = torch.autograd.grad(value, [leaf, *parameters], torch.ones_like(value))
        outputs.append(value.detach())
        input_grads.append(found[0])
        grads.append(list(found[1:]))
    return outputs, input_grads, grads


def summed(grads: Sequence[Sequence[Tensor]], order: Sequence[int]) -> list[Tensor]:
    """Parameter gradients of microbatches, added in order."""
    total = list(grads[order[0]])
    for m in order[1:]:
        total = [a + b for a, b in zip(total, grads[m], strict=True)]
    return total


Node = Callable[[Toy], ScheduleNode]
