"""What each rank does in ``tests/test_pipelining.py``: torch's DualPipeV over toy layers, plainly and overlapped."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import ScheduleDualPipeV

from layernodes import ChunkPlan, LayerPlan, Runner, pairs
from layernodes.pipelining import overlap, pipeline_stage
from tests.support import toy

_COUNT, _ROWS, _SIZE = 8, 3, 8


class _Stage(torch.nn.Sequential):
    """Two toy layers, plainly."""


def _step(stages: list[PipelineStage], batch: Tensor, pair: Any = None) -> list[Tensor]:
    schedule = ScheduleDualPipeV(stages, _COUNT, loss_fn=lambda y, t: (y - t).square().sum(), scale_grads=False)
    if pair is not None:
        overlap(schedule, pair)
    losses: list[Tensor] = []
    has_ends = dist.get_rank() == 0
    schedule.step(*([batch] if has_ends else []), target=batch * 0.5 if has_ends else None, losses=losses)
    parameters = [parameter for stage in stages for parameter in stage.submod.parameters()]
    found = [*(loss.detach() for loss in losses), *(parameter.grad for parameter in parameters)]
    for parameter in parameters:
        parameter.grad = None
    assert all(tensor is not None for tensor in found)
    return found  # type: ignore[return-value]


def dual_pipe_v() -> dict[str, Any]:
    """By case, whether losses and gradients are torch's own; and the steps of the overlapped actions."""
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)
    layers = {index: [toy.Toy(), toy.Toy()] for index in (rank, 2 * world - 1 - rank)}
    example = torch.zeros(_ROWS, _SIZE, dtype=torch.float64)
    batch = torch.randn(_COUNT * _ROWS, _SIZE, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    plain = [PipelineStage(_Stage(*of), index, 2 * world, example.device) for index, of in layers.items()]
    expected = _step(plain, batch)
    found: dict[str, Any] = {"count": len(expected)}
    for streams, names in (("inline", ("combined_1f1b", "early_release", "serial")), ("threads", ("combined_1f1b",))):
        for wgrad in ("off", "auto"):
            for name in names:
                steps: list[str] = []
                with Runner(streams, before_step=lambda step, steps=steps: steps.append(str(step))) as runner:
                    cut = [
                        pipeline_stage(
                            ChunkPlan.of([LayerPlan.build(layer, nodes=toy.NODES, wgrad=wgrad) for layer in of]),
                            *(runner, index, 2 * world, example),
                        )
                        for index, of in layers.items()
                    ]
                    for repetition in range(2):
                        actual = _step(cut, batch, pairs.BUILT_IN[name])
                        same = [torch.equal(a, b) for a, b in zip(expected, actual, strict=True)]
                        found[f"{streams} {wgrad} {name} {repetition}"] = all(same)
                found[f"{streams} {wgrad} {name} steps"] = steps
    return found
