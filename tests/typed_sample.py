"""What a user writes, for ``mypy --strict``: a node, a schedule, a run and a check, without a cast or an ignore.

``make lint`` checks it; ``tests/test_package.py`` runs it on the installed wheel.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn

from layernodes import (
    ChunkPlan,
    ChunkShape,
    LayerPlan,
    NodeContext,
    Runner,
    Schedule,
    ScheduleError,
    ScheduleNode,
    Slot,
    Step,
    StreamType,
    backward_steps,
    forward_steps,
    interleave,
    schedules,
    validate,
)


class Block(nn.Module):
    """x + linear(x)."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(size, size)


class First(ScheduleNode):
    """The linear; hands the input on."""

    slot = Slot.PRE_DISPATCH_COMPUTATION
    stream = StreamType.COMPUTE
    writes: ClassVar = {"residual": Tensor}

    def __init__(self, layer: Block) -> None:
        self.linear = layer.linear

    def forward(self, ctx: NodeContext, *inputs: Tensor) -> Tensor:
        (x,) = inputs
        self.put(ctx, "residual", x)
        output: Tensor = self.linear(x)
        return output


class Last(ScheduleNode):
    """Adds the input."""

    slot = Slot.MOE_COMBINE
    stream = StreamType.COMM
    reads: ClassVar = {"residual": Tensor}

    def __init__(self, layer: Block) -> None:
        pass

    def forward(self, ctx: NodeContext, *inputs: Tensor) -> Tensor:
        residual = self.take(ctx, "residual")
        assert isinstance(residual, Tensor)
        return inputs[0] + residual


def own_order(shape: ChunkShape) -> Schedule:
    """Two forwards woven, then their backwards."""
    steps: list[Step] = [*interleave(forward_steps(shape, 0), forward_steps(shape, 1))]
    return Schedule([*steps, *backward_steps(shape, 1), *backward_steps(shape, 0)])


def main() -> bool:
    """Whether two orders give one result."""
    plan: LayerPlan = LayerPlan.build(Block(4), nodes={Slot.PRE_DISPATCH_COMPUTATION: First, Slot.MOE_COMBINE: Last})
    chunk = ChunkPlan.of([plan])
    batches = [torch.ones(2, 4), torch.zeros(2, 4)]
    order = own_order(chunk.shape)
    try:
        validate(order, chunk.shape)
    except ScheduleError as error:
        raise SystemExit("\n".join(violation.message for violation in error.violations)) from None
    with Runner(streams="inline") as runner:
        first = runner.run(order, chunk, batches)
        second = runner.run(schedules.serial(chunk.shape, 2), chunk, batches)
    seconds: float = first.timeline.makespan
    outputs: list[Tensor] = [*first.outputs]
    return seconds > 0 and all(torch.equal(a, b) for a, b in zip(outputs, second.outputs, strict=True))


if __name__ == "__main__":
    raise SystemExit(0 if main() else 1)
