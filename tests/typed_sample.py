"""What a user writes, for ``mypy --strict`` and pyright's strict mode: nodes, schedules, a run, costs and a choice,
without a cast or an ignore.

``make lint`` checks it; ``tests/test_package.py`` runs it on the installed wheel.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import Module

from layernodes import (
    ChunkPlan,
    ChunkShape,
    CostModel,
    LayerHooks,
    LayerPlan,
    NodeContext,
    PairSchedule,
    Phase,
    Runner,
    Schedule,
    ScheduleError,
    ScheduleNode,
    Slot,
    SlotCost,
    Step,
    StreamType,
    backward_steps,
    explain,
    forward_steps,
    interleave,
    optimize,
    pairs,
    schedules,
    simulate,
    validate,
    validate_pair,
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


def chosen_order(shape: ChunkShape) -> Schedule:
    """The order that given costs ask for, which is no slower than Megatron-Core's."""
    slots = {"pre_dispatch_computation": SlotCost(F=2, B=4), "moe_combine": SlotCost(F=1, B=1)}
    costs: CostModel = CostModel(kinds={"dense": slots}).scale(communication=1.5)
    best = optimize(shape, costs, num_microbatches=2, max_states=1000)
    timeline = simulate(best, costs, shape)
    exposed: float = timeline.exposed_communication
    if timeline.makespan > simulate(schedules.combined_1f1b(shape, 2), costs, shape).makespan or exposed < 0:
        raise SystemExit("\n".join(str(cause) for cause in explain(timeline, costs).causes))
    return best


def own_pair(forward: ChunkShape | None, backward: ChunkShape | None) -> PairSchedule:
    """Megatron-Core's order of a pair, checked."""
    pair = pairs.combined_1f1b(forward, backward, early_release=True)
    validate_pair(pair, forward, backward)
    return pair


def main() -> bool:
    """Whether three orders, and a pair in two calls, give one result."""
    plan: LayerPlan = LayerPlan.build(Block(4), nodes={Slot.PRE_DISPATCH_COMPUTATION: First, Slot.MOE_COMBINE: Last})
    chunk = ChunkPlan.of([plan])
    batches = [torch.ones(2, 4), torch.zeros(2, 4)]
    order = own_order(chunk.shape)
    try:
        validate(order, chunk.shape)
    except ScheduleError as error:
        raise SystemExit("\n".join(violation.message for violation in error.violations)) from None
    entered: list[Module] = []
    hooks = LayerHooks(before_forward=entered.append)
    with Runner(streams="inline", layer_hooks=hooks) as runner:
        first = runner.run(order, chunk, batches)
        others = [runner.run(s, chunk, batches) for s in (schedules.serial(chunk.shape, 2), chosen_order(chunk.shape))]
        run = chunk.open(batches[0])
        alone = runner.run_pair(own_pair(chunk.shape, None), run, None)
        runner.run_pair(own_pair(None, chunk.shape), None, run)
    seconds: float = first.timeline.makespan
    num_forwards = sum(step.phase is Phase.F and step.slot == Slot.MOE_COMBINE for step in order)
    outputs: list[Tensor] = [*first.outputs]
    is_equal = all(
        torch.equal(a, b) for other in others for a, b in zip(outputs, other.outputs, strict=True)
    ) and torch.equal(outputs[0], alone.outputs[0])
    return is_equal and seconds > 0 and len(entered) == 3 * num_forwards


if __name__ == "__main__":
    raise SystemExit(0 if main() else 1)
