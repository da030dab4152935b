"""torch's own pipelining, ``ScheduleDualPipeV``, whose overlapped actions run as pair schedules of ours.

Two processes, four stages of one layer each: with torch's schedule as it is, and with slots interleaved, compared bit
for bit. Run it: ``torchrun --standalone --nproc-per-node 2 docs/examples/dual_pipe_v.py``.
"""

from __future__ import annotations

from typing import ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import ScheduleDualPipeV

from layernodes import ChunkPlan, LayerPlan, NodeContext, Runner, ScheduleNode, Slot, StreamType
from layernodes.pipelining import overlap, pipeline_stage

SIZE, TOKENS, NUM_MICROBATCHES = 16, 6, 8


class Block(nn.Module):
    """x + down(relu(up(x)))."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(SIZE, 2 * SIZE), nn.Linear(2 * SIZE, SIZE)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).relu())


class Up(ScheduleNode):
    slot, stream = Slot.PRE_DISPATCH_COMPUTATION, StreamType.COMPUTE
    writes: ClassVar = {"x": Tensor}

    def __init__(self, layer: Block) -> None:
        self.up = layer.up

    def forward(self, ctx: NodeContext, *inputs: Tensor) -> Tensor:
        self.put(ctx, "x", inputs[0])
        return self.up(inputs[0])


class Pass(ScheduleNode):
    """Stands where a layer with experts exchanges tokens; see ``own_moe.py``."""

    slot, stream = Slot.MOE_DISPATCH, StreamType.COMM

    def forward(self, ctx: NodeContext, *inputs: Tensor) -> Tensor:
        return inputs[0].relu()


class Down(ScheduleNode):
    slot, stream = Slot.MLP, StreamType.COMPUTE
    reads: ClassVar = {"x": Tensor}

    def __init__(self, layer: Block) -> None:
        self.down = layer.down

    def forward(self, ctx: NodeContext, *inputs: Tensor) -> Tensor:
        return self.take(ctx, "x") + self.down(inputs[0])


NODES = {node.slot: node for node in (Up, Pass, Down)}


def step(stages: list[PipelineStage], batch: Tensor, *, overlapped: bool) -> list[Tensor]:
    """One training step; losses where the last stage is, and every gradient."""
    schedule = ScheduleDualPipeV(
        stages, NUM_MICROBATCHES, loss_fn=lambda output, target: (output - target).square().sum(), scale_grads=False
    )
    if overlapped:
        overlap(schedule)  # Megatron-Core's order; or overlap(schedule, pair), with an order of your own
    losses: list[Tensor] = []
    is_first_and_last = dist.get_rank() == 0  # the first rank of a V has both ends
    if is_first_and_last:
        schedule.step(batch, target=batch * 0.5, losses=losses)
    else:
        schedule.step()
    parameters = [parameter for stage in stages for parameter in stage.submod.parameters()]
    gradients = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    return [*(loss.detach() for loss in losses), *gradients]


def main() -> None:
    """Run both and compare."""
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)
    layers = {index: Block() for index in (rank, 2 * world - 1 - rank)}
    example, batch = torch.zeros(TOKENS, SIZE), torch.randn(NUM_MICROBATCHES * TOKENS, SIZE)
    plain = [PipelineStage(layer, index, 2 * world, example.device) for index, layer in layers.items()]
    with Runner("threads") as runner:
        chunks = {i: ChunkPlan.of([LayerPlan.build(layer, nodes=NODES)]) for i, layer in layers.items()}
        cut = [pipeline_stage(chunk, runner, i, 2 * world, example) for i, chunk in chunks.items()]
        expected = step(plain, batch, overlapped=False)
        actual = step(cut, batch, overlapped=True)
    equal = all(torch.equal(a, b) for a, b in zip(expected, actual, strict=True))
    print(f"bitwise {'equal' if equal else 'DIFFERENT'}: {len(actual)} losses and gradients of rank {rank}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
