"""A mixture-of-experts layer in plain torch, cut into four nodes; nothing of Megatron-Core is used.

Plainly and under ``combined_1f1b`` with deferred weight gradients, compared bit for bit: ``python own_moe.py``, or
with half of the experts on each of two processes, ``torchrun --standalone --nproc-per-node 2 own_moe.py``.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from layernodes import ChunkPlan, LayerPlan, NodeContext, Runner, ScheduleNode, Slot, StreamType, schedules

SIZE, TOP_K, NUM_EXPERTS = 16, 2, 4


def route(norm: Any, score: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Rows in the order of their experts, ``[tokens * TOP_K, SIZE]``; their places, weights, and how many an expert."""
    weights, chosen = score(hidden := norm(x)).softmax(-1).topk(TOP_K)
    order = chosen.flatten().argsort(stable=True)
    return hidden[order // TOP_K], order, weights.flatten()[order], chosen.flatten().bincount(minlength=NUM_EXPERTS)


class Exchange(torch.autograd.Function):
    """All-to-all of rows; backward sends the gradients the other way."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, sent: list[int], received: list[int]) -> Tensor:
        ctx.splits = received, sent
        output = rows.new_empty(sum(received), rows.shape[1])
        dist.all_to_all_single(output, rows.contiguous(), received, sent)
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        return Exchange.apply(gradient, *ctx.splits), None, None


def dispatch(rows: Tensor, counts: Tensor) -> tuple[Tensor, Tensor, list[list[int]]]:
    """Rows to the ranks of their experts: what came here, the expert of each, and how many rows went and came."""
    arriving = torch.empty_like(counts)
    dist.all_to_all_single(arriving, counts)
    table = arriving.view(dist.get_world_size(), -1)
    splits = [counts.view_as(table).sum(1).tolist(), table.sum(1).tolist()]
    owner = torch.arange(table.shape[1]).repeat(len(table)).repeat_interleave(arriving)
    return Exchange.apply(rows, *splits), owner, splits


def run_experts(experts: Any, rows: Tensor, owner: Tensor) -> Tensor:
    """Each row through its expert."""
    order = owner.argsort(stable=True)
    parts = rows[order].split(torch.bincount(owner, minlength=len(experts)).tolist())
    return torch.cat([expert(part).relu() for expert, part in zip(experts, parts, strict=True)])[order.argsort()]


def combine(rows: Tensor, splits: list[list[int]], x: Tensor, order: Tensor, weights: Tensor) -> Tensor:
    """Rows back to their tokens: the residual, and the weighted sum of what the experts made of it."""
    returned = Exchange.apply(rows, *splits[::-1])
    return x.index_add(0, order // TOP_K, returned * weights[:, None])


class MoeLayer(nn.Module):
    """The layer; ``forward`` is what the nodes must equal."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.score = nn.LayerNorm(SIZE), nn.Linear(SIZE, NUM_EXPERTS)
        self.experts = nn.ModuleList(nn.Linear(SIZE, SIZE) for _ in range(NUM_EXPERTS // dist.get_world_size()))

    def forward(self, x: Tensor) -> Tensor:
        rows, order, weights, counts = route(self.norm, self.score, x)
        arrived, owner, splits = dispatch(rows, counts)
        return combine(run_experts(self.experts, arrived, owner), splits, x, order, weights)


class RouteNode(ScheduleNode):
    slot, stream = Slot.PRE_DISPATCH_COMPUTATION, StreamType.COMPUTE
    writes: ClassVar = {"x": Tensor, "order": Tensor, "weights": Tensor, "counts": Tensor}

    def __init__(self, layer: MoeLayer) -> None:
        self.norm, self.score = layer.norm, layer.score  # a node holds the modules that it uses, and no other

    def forward(self, ctx: NodeContext, *inputs: Tensor) -> Tensor:
        rows, *others = route(self.norm, self.score, inputs[0])
        for name, value in zip(self.writes, (inputs[0], *others), strict=True):
            self.put(ctx, name, value)
        return rows


class DispatchNode(ScheduleNode):
    slot, stream = Slot.MOE_DISPATCH, StreamType.COMM
    reads: ClassVar = {"counts": Tensor}
    writes: ClassVar = {"owner": Tensor, "splits": list}

    def forward(self, ctx: NodeContext, *inputs: Tensor) -> Tensor:
        rows, owner, splits = dispatch(inputs[0], self.take(ctx, "counts"))
        self.put(ctx, "owner", owner)
        self.put(ctx, "splits", splits)
        return rows


class ExpertsNode(ScheduleNode):
    slot, stream = Slot.MLP, StreamType.COMPUTE
    reads: ClassVar = {"owner": Tensor}

    def __init__(self, layer: MoeLayer) -> None:
        self.experts = layer.experts

    def forward(self, ctx: NodeContext, *inputs: Tensor) -> Tensor:
        return run_experts(self.experts, inputs[0], self.take(ctx, "owner"))


class CombineNode(ScheduleNode):
    slot, stream = Slot.MOE_COMBINE, StreamType.COMM
    reads: ClassVar = {"splits": list, "x": Tensor, "order": Tensor, "weights": Tensor}

    def forward(self, ctx: NodeContext, *inputs: Tensor) -> Tensor:
        return combine(inputs[0], *(self.take(ctx, name) for name in self.reads))


NODES = {node.slot: node for node in (RouteNode, DispatchNode, ExpertsNode, CombineNode)}


def main() -> None:
    """Run plainly and through the nodes, and compare."""
    alone = {} if dist.is_torchelastic_launched() else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group("gloo", **alone)
    torch.manual_seed(dist.get_rank())
    model, batches = nn.Sequential(MoeLayer(), MoeLayer()), [torch.randn(12, SIZE).requires_grad_() for _ in range(4)]
    outputs = [model(batch) for batch in batches]
    for output in outputs:
        output.sum().backward()
    expected = [*outputs, *(tensor.grad for tensor in (*batches, *model.parameters()))]
    model.zero_grad()
    chunk = ChunkPlan.of([LayerPlan.build(layer, nodes=NODES, wgrad="auto") for layer in model])
    order = schedules.deferred(schedules.combined_1f1b(chunk.shape, 4), chunk.shape, "next_comm")
    with Runner("threads") as runner:
        result = runner.run(order, chunk, batches)
    actual = [*result.outputs, *result.input_grads, *(parameter.grad for parameter in model.parameters())]
    equal = all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))
    print(f"bitwise {'equal' if equal else 'DIFFERENT'}: {len(actual)} tensors, {dist.get_world_size()} processes")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
