"""Accelerator streams: the same bits as inline, communication beside computation, storages kept for their readers.

Run with ``pytest -m gpu`` where an accelerator is at hand.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from layernodes import (
    ChunkPlan,
    LayerPlan,
    NodeContext,
    Runner,
    Schedule,
    ScheduleNode,
    Slot,
    StepError,
    StreamType,
    schedules,
)
from tests.support import toy

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.accelerator.is_available(), reason="needs an accelerator"),
]


def _device() -> torch.device:
    device = torch.accelerator.current_accelerator()
    assert device is not None
    return device


def _setup(count: int = 4) -> tuple[list[toy.Toy], ChunkPlan, list[Tensor]]:
    layers = [copy.deepcopy(layer).to(_device()) for layer in toy.toys()]
    batches = [batch.detach().to(_device()).requires_grad_() for batch in toy.inputs(count)]
    return layers, toy.chunk_of(layers), batches


def _results(streams: str, schedule: Any, count: int = 4) -> list[Tensor | None]:
    layers, chunk, batches = _setup(count)
    with Runner(streams=streams) as runner:
        result = runner.run(schedule(chunk.shape, count), chunk, batches)
    return [*result.outputs, *result.input_grads, *(p.grad for layer in layers for p in layer.parameters())]


@pytest.mark.parametrize("schedule", [schedules.serial, schedules.combined_1f1b, schedules.forward_forward])
@pytest.mark.parametrize("kind", ["cuda", "auto"])
def test_bits_are_those_of_inline(kind: str, schedule: Any) -> None:
    """Outputs and all gradients, whichever streams the steps ran on, over several rounds."""
    expected = _results("inline", schedule)
    for _ in range(5):
        found = _results(kind, schedule)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))  # type: ignore[arg-type]


def _spin(cycles: int) -> None:
    torch.cuda._sleep(cycles)


class _SlowSend(toy.Send):
    """Keeps the communication stream busy before it reads its input."""

    def forward(self, ctx: NodeContext, *inputs: Tensor) -> Tensor:
        _spin(2_000_000)
        return super().forward(ctx, *inputs)


class _SlowMiddle(toy.Middle):
    """Keeps the compute stream busy before it reads its input."""

    def forward(self, ctx: NodeContext, *inputs: Tensor) -> Tensor:
        _spin(2_000_000)
        return super().forward(ctx, *inputs)


@pytest.mark.parametrize("slow", [{"moe_dispatch": _SlowSend}, {"mlp": _SlowMiddle}])
def test_storages_are_not_reused_under_a_slow_stream(slow: dict[str, Any]) -> None:
    """While one stream lags, the other allocates and overwrites all it can: the bits stay."""
    layers, _, batches = _setup()
    chunk = toy.chunk_of(layers, **slow)
    expected = [p.clone() for p in (_results("inline", schedules.forward_forward)) if p is not None]

    def trash(_: Any) -> None:
        for _round in range(8):
            torch.full((6, 8), float("nan"), dtype=torch.float64, device=_device())

    with Runner(streams="cuda", after_step=trash) as runner:
        result = runner.run(schedules.forward_forward(chunk.shape, 4), chunk, batches)
    found = [*result.outputs, *result.input_grads, *(p.grad for layer in layers for p in layer.parameters())]
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))  # type: ignore[arg-type]


class _Busy(ScheduleNode):
    """Enough work to be seen in a trace."""

    slot = Slot.MLP
    stream = StreamType.COMPUTE

    def __init__(self, layer: Any) -> None:
        pass

    def forward(self, ctx: NodeContext, *inputs: Tensor) -> Tensor:
        _spin(5_000_000)
        return inputs[0] * 2


class _BusyComm(_Busy):
    slot = Slot.MOE_DISPATCH
    stream = StreamType.COMM


def test_a_communication_kernel_runs_beside_a_compute_kernel() -> None:
    """In the profiler's trace, kernels of two streams overlap in time; so do the intervals of the timeline."""
    plan = LayerPlan.build(torch.nn.Module(), nodes={Slot.MOE_DISPATCH: _BusyComm, Slot.MLP: _Busy})
    chunk = ChunkPlan.of([plan])
    batches = [torch.ones(4, device=_device()) for _ in range(4)]
    schedule = schedules.forward_only(chunk.shape, 4, group=4)
    assert isinstance(schedule, Schedule)
    with Runner(streams="cuda") as runner:
        runner.run(schedule, chunk, batches)
        with torch.profiler.profile() as prof:
            result = runner.run(schedule, chunk, batches)
    events = prof.events()
    assert events is not None
    kernels = [e for e in events if e.device_type == torch.autograd.DeviceType.CUDA and "spin" in e.name.lower()]
    by_stream: dict[int, list[tuple[float, float]]] = {}
    for kernel in kernels:
        by_stream.setdefault(kernel.device_resource_id, []).append((kernel.time_range.start, kernel.time_range.end))
    assert len(by_stream) == 2, by_stream.keys()
    first, second = by_stream.values()
    assert any(a < d and c < b for a, b in first for c, d in second)
    lanes = [[i for i in result.timeline.intervals if i.stream is stream] for stream in StreamType]
    assert any(a.start < b.end and b.start < a.end for a in lanes[0] for b in lanes[1])
    assert {str(step) for step in schedule} <= {e.name for e in events}


def test_a_fault_leaves_the_caller_on_its_stream() -> None:
    """The error surfaces once, the current stream is the caller's, and the chunk serves on."""
    layers, chunk, batches = _setup(3)
    stream = torch.accelerator.current_stream()
    layers[1].fuse.armed = ("F", Slot.MOE_DISPATCH)
    with Runner(streams="cuda") as runner:
        with pytest.raises(StepError):
            runner.run(schedules.combined_1f1b(chunk.shape, 3), chunk, batches)
        assert torch.accelerator.current_stream() == stream
        layers[1].fuse.armed = None
        for layer in layers:
            layer.zero_grad()
        result = runner.run(schedules.combined_1f1b(chunk.shape, 3), chunk, batches)
    assert all(output.isfinite().all() for output in result.outputs)
    assert torch.accelerator.current_stream() == stream
