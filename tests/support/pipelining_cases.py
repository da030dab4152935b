"""What each rank does in ``tests/test_pipelining.py``: torch's DualPipeV over toy layers, plainly and overlapped."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, ClassVar
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import ScheduleDualPipeV
from torch.nn import Linear, Module, Sequential

from layernodes import ChunkPlan, LayerPlan, NodeContext, Runner, ScheduleNode, Slot, StreamType, pairs
from layernodes.pipelining import ChunkStage, overlap, pipeline_stage
from tests.support import toy

_COUNT, _ROWS, _SIZE = 8, 3, 8


class _Stage(Sequential):
    """Two toy layers, plainly."""


def _loss(y: Tensor, target: Tensor, scale: float = 1.0) -> Tensor:
    return (y - target).abs().square().sum() * scale


def _step(stages: list[PipelineStage], batch: Tensor, pair: Any = None, **options: Any) -> list[Tensor]:
    schedule = ScheduleDualPipeV(stages, _COUNT, loss_fn=_loss, scale_grads=False)
    if pair is not None:
        overlap(schedule, pair)
    losses: list[Tensor] = []
    has_ends = dist.get_rank() == 0
    schedule.step(*([batch] if has_ends else []), target=batch * 0.5 if has_ends else None, losses=losses, **options)
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
    return {**found, "options": _options(), "complex": _complex(), "autocast": _autocast()}


def _cut(layers: dict[int, Module], nodes: Any, runner: Runner, example: Tensor) -> list[PipelineStage]:
    plans = {index: LayerPlan.build(layer, nodes=nodes) for index, layer in layers.items()}
    count = 2 * dist.get_world_size()
    return [pipeline_stage(ChunkPlan.of([plan]), runner, index, count, example) for index, plan in plans.items()]


def _options() -> dict[str, bool]:
    """What ``step`` is called with reaches overlapped actions, and holds for that call alone."""
    rank, world = dist.get_rank(), dist.get_world_size()
    layers: dict[int, Module] = {index: toy.Toy() for index in (rank, 2 * world - 1 - rank)}
    example = torch.zeros(_ROWS, _SIZE, dtype=torch.float64)
    batch = torch.randn(_COUNT * _ROWS, _SIZE, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    plain = [PipelineStage(layer, index, 2 * world, example.device) for index, layer in layers.items()]
    found: dict[str, bool] = {}
    with Runner("inline") as runner:
        cut = _cut(layers, toy.NODES, runner, example)
        calls: dict[str, dict[str, Any]] = {
            "scaled": {"loss_kwargs": {"scale": 3.0}},
            "none": {},
            "lean": {"return_outputs": False},
        }
        for name, options in calls.items():
            expected = _step(plain, batch, **options)
            found[name] = all(map(torch.equal, expected, _step(cut, batch, pairs.combined_1f1b, **options)))
            kept = [[len(stage.output_chunks) for stage in stages] for stages in (plain, cut)]
            found[f"{name} outputs"] = kept[0] == kept[1]
    return found


class _Turn(ScheduleNode):
    slot = Slot.MLP
    stream = StreamType.COMPUTE

    def __init__(self, layer: Module) -> None:
        self.linear = layer

    def forward(self, ctx: NodeContext, *inputs: Tensor) -> Any:
        return self.linear(inputs[0])


def _complex() -> bool:
    """Whether gradients of complex stages are those of the layers in one graph (torch's own stages refuse them)."""
    rank, count = dist.get_rank(), 2 * dist.get_world_size()
    torch.manual_seed(7)
    layers: list[Module] = [Linear(_SIZE, _SIZE, dtype=torch.complex128) for _ in range(count)]
    own = {index: layers[index] for index in (rank, count - 1 - rank)}
    batch = torch.randn(_COUNT * _ROWS, _SIZE, dtype=torch.complex128)
    for x in batch.chunk(_COUNT):
        _loss(Sequential(*layers)(x), x * 0.5).backward()  # type: ignore[no-untyped-call]  # untyped in torch
    expected = [parameter.grad for layer in own.values() for parameter in layer.parameters()]
    for parameter in Sequential(*layers).parameters():
        parameter.grad = None
    with Runner("inline") as runner:
        cut = _cut(own, {Slot.MLP: _Turn}, runner, torch.zeros(_ROWS, _SIZE, dtype=torch.complex128))
        actual = _step(cut, batch, pairs.combined_1f1b)[-len(expected) :]
    return all(
        grad is not None and torch.equal(grad, own_grad) for grad, own_grad in zip(expected, actual, strict=True)
    )


class _Casting(Module):
    """Two linears in fp32, each cast back from what autocast makes of it."""

    def __init__(self) -> None:
        super().__init__()
        self.first = Linear(_SIZE, _SIZE)
        self.second = Linear(_SIZE, _SIZE)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.second(torch.tanh(self.first(x).float())).float())


class _First(ScheduleNode):
    slot = Slot.MOE_DISPATCH
    stream = StreamType.COMM
    names: ClassVar[str] = "first"

    def __init__(self, layer: _Casting) -> None:
        self.linear = getattr(layer, self.names)

    def forward(self, ctx: NodeContext, *inputs: Tensor) -> Tensor:
        return torch.tanh(self.linear(inputs[0]).float())


class _Second(_First):
    slot = Slot.MLP
    stream = StreamType.COMPUTE
    names = "second"


def _on_a_thread(go_backward: Callable[..., Any]) -> Callable[..., Any]:
    """As autograd calls a node of tensors on an accelerator: on a thread of its own, without the caller's autocast."""

    def call(*arguments: Any) -> Any:
        found: list[Any] = []
        thread = threading.Thread(target=lambda: found.append(go_backward(*arguments)))
        thread.start()
        thread.join()
        return found[0]

    return call


def _autocast() -> dict[str, bool]:
    """Under autocast, with the backward on another thread: by case, whether losses and gradients are torch's own."""
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)
    layers = {index: [_Casting(), _Casting()] for index in (rank, 2 * world - 1 - rank)}
    nodes = {node.slot: node for node in (_First, _Second)}
    example = torch.zeros(_ROWS, _SIZE)
    batch = torch.randn(_COUNT * _ROWS, _SIZE, generator=torch.Generator().manual_seed(5))
    expected: dict[bool, list[Tensor]] = {}
    for casts in (True, False):
        plain = [PipelineStage(_Stage(*of), index, 2 * world, example.device) for index, of in layers.items()]
        with torch.autocast("cpu", torch.bfloat16) if casts else nullcontext():
            expected[casts] = _step(plain, batch)
    found = {"casts": not torch.equal(expected[True][-1], expected[False][-1])}
    for streams in ("inline", "threads"):
        for pair in (pairs.combined_1f1b, None):
            with Runner(streams) as runner:
                cut = [
                    pipeline_stage(
                        ChunkPlan.of([LayerPlan.build(layer, nodes=nodes) for layer in of]),
                        *(runner, index, 2 * world, example),
                    )
                    for index, of in layers.items()
                ]
                on_a_thread = mock.patch.object(ChunkStage, "go_backward", _on_a_thread(ChunkStage.go_backward))
                with on_a_thread, torch.autocast("cpu", torch.bfloat16):
                    actual = _step(cut, batch, pair)
            found[f"{streams} {pair is not None}"] = all(map(torch.equal, expected[True], actual))
    return found
