"""What each rank does where its two streams meet process groups: collectives from both, a node that raises."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from layernodes import (
    ChunkPlan,
    ExpertNode,
    NodeContext,
    Runner,
    Slot,
    Step,
    StepError,
    StreamOrderError,
    schedules,
)
from tests.support import toy
from tests.support.configs import by_name
from tests.support.rank_cases import seconds_to_end
from tests.support.runs import Bench
from tests.support.world import use_layout


class _Reduce(torch.autograd.Function):
    """An all-reduce in forward, or in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any, in_forward: bool) -> Tensor:
        ctx.group, ctx.in_forward = group, in_forward
        if in_forward:
            dist.all_reduce(torch.ones(1), group=group)
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        if not ctx.in_forward:
            dist.all_reduce(torch.ones(1), group=ctx.group)
        return gradient, None, None


def _reducing(base: type[Any], group: Any, *, in_forward: bool = True) -> type[Any]:
    class Reducing(base):  # type: ignore[misc]
        def forward(self, ctx: NodeContext, *inputs: Tensor) -> Tensor:
            output: Tensor = _Reduce.apply(super().forward(ctx, *inputs), group, in_forward)
            return output

    return Reducing


class _GatheringExperts(ExpertNode):
    """Experts that use the group over which tokens are exchanged, on the compute stream."""

    def forward(self, ctx: NodeContext, *inputs: Tensor) -> Any:
        dist.all_reduce(torch.ones(1), group=parallel_state.get_expert_model_parallel_group())
        return super().forward(ctx, *inputs)


def both_lanes() -> dict[str, Any]:
    """Which nodes of which layers get which error; a run on the same groups afterwards."""
    cell = by_name("alltoall-moe-ep2")
    use_layout(cell)
    bench = Bench(cell)
    world, other = dist.group.WORLD, dist.new_group([0, 1])
    batches = toy.inputs(2)
    chunks = {
        "own": toy.chunk_of(toy.toys(), moe_dispatch=_reducing(toy.Send, world), mlp=_reducing(toy.Middle, world)),
        "backward": toy.chunk_of(
            toy.toys(), moe_combine=_reducing(toy.Return, world, in_forward=False), mlp=_reducing(toy.Middle, world)
        ),
        "groups of their own": toy.chunk_of(
            toy.toys(), moe_dispatch=_reducing(toy.Send, world), mlp=_reducing(toy.Middle, other)
        ),
        "megatron": ChunkPlan.build(bench.model, nodes={Slot.MLP: _GatheringExperts}),
    }
    found: dict[str, Any] = {}
    for streams in ("inline", "threads"):
        for name, chunk in chunks.items():
            with Runner(streams=streams) as runner:
                # In order on threads too: beside each other, the ranks would meet in different collectives, and hang.
                schedule = schedules.serial(chunk.shape, 2)
                try:
                    runner.run(schedule, chunk, bench.batches()[:2] if name == "megatron" else batches)
                    found[f"{name} {streams}"] = "ran"
                except StreamOrderError as error:
                    found[f"{name} {streams}"] = {"rule": error.rule, "step": error.step, "other": error.other}
    shape = bench.chunk().shape
    found["plain bits"] = bench.check(schedules.combined_1f1b(shape, len(bench.microbatches)), streams="threads")
    return found


ABSENT = "absent"
"""Stands for the step of a rank that never comes."""


def raising_node(name: str, group_seconds: float) -> dict[str, Any]:
    """Rank 1's node raises in mid-step, on each stream, or it never comes; what either rank gets, and when.

    Megatron-Core's groups have ``group_seconds`` as their timeout.
    """
    found: dict[str, Any] = {}
    cell = by_name(name)
    for step in ("F1.L0.mlp", "B0.L1.moe_combine", ABSENT):
        use_layout(cell, seconds=group_seconds)
        found[step] = _raise_at(Bench(cell), step)
        parallel_state.destroy_model_parallel()
    return found


def _raise_at(bench: Bench, at: str) -> dict[str, Any]:
    """A run that goes well, then one in which rank 1 raises at the step ``at``, or that it leaves out."""
    is_failing = dist.get_rank() == 1
    is_armed = False
    latest = time.monotonic()

    def plant(step: Step) -> None:
        if is_armed and is_failing and str(step) == at:
            raise ValueError("planted")

    def note(_: Step) -> None:
        nonlocal latest
        latest = time.monotonic()

    bench.reset()
    schedule = schedules.combined_1f1b(bench.chunk().shape, len(bench.microbatches))
    seen: dict[str, Any] = {"step": None}
    runner = Runner(streams="threads", before_step=plant, after_step=note)
    runner.run(schedule, bench.chunk(), bench.batches(), bench.loss_grads())
    is_armed = True
    try:
        if at != ABSENT or not is_failing:
            runner.run(schedule, bench.chunk(), bench.batches(), bench.loss_grads())
    except StepError as error:
        seen = {"step": error.step, "seconds": time.monotonic() - latest, "cause": type(error.__cause__).__name__}
    seen["thread"] = seconds_to_end()
    dist.barrier()  # neither leaves before the other has its error: a process that ends is an error at once
    return seen
