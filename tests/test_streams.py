"""Streams: each lane is a FIFO, each crossing waits, a failure ends both, and a lane's thread works as the caller."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor
from torch.nn import Linear

from layernodes import ChunkPlan, LayerPlan, NodeContext, NodeStateError, Runner, ScheduleNode, Slot, StreamType
from layernodes import schedules as built_in
from layernodes.device_streams import DeviceStreams
from layernodes.plan.stream_kind import StreamKind, make_streams
from layernodes.state import HandoffMap
from layernodes.streams import NO_WAIT, InlineStreams, ThreadStreams
from tests.support.device import StandInEvent, stand_in_device

COMPUTE, COMM = 0, 1


@dataclass(frozen=True)
class _Task:
    text: str
    lane: int
    index: int
    position: int
    waits_for: int
    is_awaited: bool = True


def _tasks(*given: tuple[int, int]) -> list[_Task]:
    """Tasks from (lane, index in the other lane that it waits for)."""
    counts = [0, 0]
    tasks = []
    for position, (lane, waits_for) in enumerate(given):
        tasks.append(_Task(f"t{position}", lane, counts[lane], position, waits_for))
        counts[lane] += 1
    return tasks


@pytest.fixture(autouse=True)
def no_thread_left() -> Iterator[None]:
    """The lane's thread ends with its run."""
    yield
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("layernodes")]


class TestOrder:
    """Of the tasks of both lanes."""

    @pytest.mark.parametrize("streams", [InlineStreams(), ThreadStreams()])
    def test_each_lane_is_a_fifo_and_each_crossing_waits(self, streams: Any) -> None:
        tasks = _tasks((COMPUTE, NO_WAIT), (COMM, 0), (COMPUTE, 0), (COMM, NO_WAIT), (COMM, 1), (COMPUTE, 2))
        done: list[str] = []

        def perform(task: _Task, lane: object) -> None:
            assert lane is None
            time.sleep(0.01 if task.lane == COMM else 0.002)
            done.append(task.text)

        spans = streams.run(tasks, perform)
        assert sorted(done) == [task.text for task in tasks]
        for task in tasks:
            before = [other for other in tasks if other.lane == task.lane and other.index < task.index]
            before += [o for o in tasks if o.lane != task.lane and o.index == task.waits_for]
            for other in before:
                assert done.index(other.text) < done.index(task.text)
                assert spans[other.position][1] <= spans[task.position][0]
        assert all(0 <= start <= end for start, end in spans)

    def test_lanes_run_side_by_side(self) -> None:
        barrier = threading.Barrier(2, timeout=5)
        ThreadStreams[_Task]().run(_tasks((COMPUTE, NO_WAIT), (COMM, NO_WAIT)), lambda task, lane: barrier.wait())  # type: ignore[arg-type,return-value]

    @pytest.mark.parametrize("lane", [COMPUTE, COMM])
    def test_one_lane_alone(self, lane: int) -> None:
        done: list[tuple[str, bool]] = []
        caller = threading.current_thread()
        ThreadStreams[_Task]().run(
            _tasks((lane, NO_WAIT), (lane, NO_WAIT)),
            lambda task, _: done.append((task.text, threading.current_thread() is caller)),
        )
        assert done == [("t0", lane == COMPUTE), ("t1", lane == COMPUTE)]

    def test_no_task(self) -> None:
        assert ThreadStreams[_Task]().run([], lambda task, lane: None) == []


class TestFailures:
    """The first one ends the run; nothing that waits for it runs."""

    @pytest.mark.parametrize("lane", [COMPUTE, COMM])
    def test_what_waits_does_not_run(self, lane: int) -> None:
        tasks = _tasks((lane, NO_WAIT), (1 - lane, 0), (lane, NO_WAIT))
        done: list[str] = []

        def perform(task: _Task, _: object) -> None:
            if task.text == "t0":
                time.sleep(0.02)
                raise ValueError("planted")
            done.append(task.text)

        with pytest.raises(ValueError, match="planted"):
            ThreadStreams[_Task]().run(tasks, perform)
        assert done == []

    def test_the_first_of_two_is_raised(self) -> None:
        both = threading.Barrier(2, timeout=5)

        def perform(task: _Task, _: object) -> None:
            both.wait()
            time.sleep(0.1 * task.lane)
            raise ValueError(task.text)

        with pytest.raises(ValueError, match="t0"):
            ThreadStreams[_Task]().run(_tasks((COMPUTE, NO_WAIT), (COMM, NO_WAIT)), perform)

    @pytest.mark.parametrize("raises_later", [False, True])
    def test_patience(self, raises_later: bool) -> None:
        """A lane that is in a long task is waited for no longer; it then ends in silence and holds nothing."""
        go_on = threading.Event()
        started = threading.Event()
        held: list[weakref.ref[Tensor]] = []

        def perform(task: _Task, _: object) -> None:
            if task.lane == COMM:
                tensor = torch.zeros(3)
                held.append(weakref.ref(tensor))
                started.set()
                go_on.wait(20)
                if raises_later:
                    raise ValueError("later")
            else:
                started.wait(20)
                raise ValueError("planted")

        gc.collect()
        gc.disable()
        try:
            began = time.monotonic()
            with pytest.raises(ValueError, match="planted"):
                ThreadStreams[_Task](patience=0.1).run(_tasks((COMPUTE, NO_WAIT), (COMM, NO_WAIT)), perform)
            assert 0.1 <= time.monotonic() - began < 1
            (left,) = [thread for thread in threading.enumerate() if thread.name.startswith("layernodes")]
            assert held[0]() is not None
            go_on.set()
            left.join(5)
            assert held[0]() is None
        finally:
            gc.enable()


def _settings() -> dict[str, Any]:
    """What torch keeps for each thread, and for a run matters."""
    return {
        "grad": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "autocast": [torch.is_autocast_enabled(kind) for kind in ("cpu", "cuda")],
        "dtype": [torch.get_autocast_dtype(kind) for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)],
        "cache": torch.is_autocast_cache_enabled(),
        "device": str(torch.get_default_device()),
        "made on": str(torch.empty(1).device),
        "product": str((torch.ones(2, 2, device="cpu") @ torch.ones(2, 2, device="cpu")).dtype),
    }


_CALLERS: dict[str, tuple[Callable[[], Any], ...]] = {
    "plain": (),
    "no_grad": (torch.no_grad,),
    "enable_grad": (torch.no_grad, torch.enable_grad),
    "inference_mode": (torch.inference_mode,),
    "grad in inference": (torch.inference_mode, torch.enable_grad),
    "autocast": (lambda: torch.autocast("cpu", dtype=torch.bfloat16),),
    "autocast float16": (lambda: torch.autocast("cpu", dtype=torch.float16),),
    "autocast, no cache": (lambda: torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False),),
    "autocast turned off inside": (
        lambda: torch.autocast("cpu", dtype=torch.bfloat16),
        lambda: torch.autocast("cpu", enabled=False),
    ),
    "default device": (lambda: torch.device("meta"),),
    "default device set back": (lambda: torch.device("meta"), lambda: torch.device("cpu")),
    "all at once": (
        torch.no_grad,
        lambda: torch.autocast("cpu", dtype=torch.bfloat16),
        lambda: torch.device("meta"),
    ),
}
_AS_WITHOUT = ("plain", "enable_grad", "autocast turned off inside", "default device set back")


@pytest.mark.parametrize("caller", _CALLERS)
def test_both_lanes_work_as_the_caller(caller: str) -> None:
    """Grad mode, inference mode, autocast and default device are those of the caller, who keeps them."""
    seen: dict[int, dict[str, Any]] = {}
    plain = _settings()
    with ExitStack() as stack:
        for enter in _CALLERS[caller]:
            stack.enter_context(enter())
        expected = _settings()

        def perform(task: _Task, _: object) -> None:
            seen[task.lane] = _settings()

        ThreadStreams[_Task]().run(_tasks((COMPUTE, NO_WAIT), (COMM, NO_WAIT)), perform)
        assert _settings() == expected
    assert seen == {COMPUTE: expected, COMM: expected}
    assert (expected == plain) is (caller in _AS_WITHOUT)
    assert _settings() == plain


def test_both_lanes_save_tensors_through_the_callers_hooks() -> None:
    """The innermost of them, as in the caller's thread; when the run is over, so are they."""
    packed: list[str] = []

    def packing(name: str) -> Any:
        return torch.autograd.graph.saved_tensors_hooks(lambda tensor: (packed.append(name), tensor)[1], lambda t: t)

    def perform(task: _Task, _: object) -> None:
        _ = torch.ones(2, requires_grad=True) ** 2

    tasks = _tasks((COMPUTE, NO_WAIT), (COMM, NO_WAIT))
    with packing("outer"):
        ThreadStreams[_Task]().run(tasks, perform)
        with packing("inner"):
            ThreadStreams[_Task]().run(tasks, perform)
    ThreadStreams[_Task]().run(tasks, perform)
    assert packed == ["outer", "outer", "inner", "inner"]


def test_a_default_device_set_for_good() -> None:
    """``torch.set_default_device`` reaches the communication lane too."""
    seen: list[str] = []
    torch.set_default_device("meta")
    try:
        ThreadStreams[_Task]().run(_tasks((COMM, NO_WAIT)), lambda task, _: seen.append(str(torch.empty(1).device)))
    finally:
        torch.set_default_device(None)
    assert seen == ["meta"]


class _Product(ScheduleNode):
    """A linear on the communication lane."""

    slot = Slot.MOE_COMBINE
    stream = StreamType.COMM

    def __init__(self, layer: Any) -> None:
        self.linear = layer[1]

    def forward(self, ctx: NodeContext, *inputs: Tensor) -> Tensor:
        output: Tensor = self.linear(inputs[0]) * torch.ones(3)
        return output


class _First(_Product):
    slot = Slot.MLP
    stream = StreamType.COMPUTE

    def __init__(self, layer: Any) -> None:
        self.linear = layer[0]


@pytest.mark.parametrize("streams", ["inline", "threads", "recording"])
def test_a_run_under_autocast_has_the_plain_layers_bits(streams: str) -> None:
    """Linears on both lanes, forward and backward, in bfloat16 as the caller would have it."""
    torch.manual_seed(3)
    layers = torch.nn.ModuleList([Linear(3, 3), Linear(3, 3)])
    batches: Sequence[Tensor] = [torch.randn(4, 3, requires_grad=True) for _ in range(2)]
    chunk = ChunkPlan.of([LayerPlan.build(layers, nodes={Slot.MLP: _First, Slot.MOE_COMBINE: _Product})])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        outputs = []
        for batch in batches:
            middle = layers[0](batch) * torch.ones(3)
            outputs.append(layers[1](middle) * torch.ones(3))
            outputs[-1].backward(torch.ones_like(outputs[-1]))
        expected = [batch.grad for batch in batches] + [p.grad for p in layers.parameters()]
        layers.zero_grad()
        with Runner(streams=streams) as runner:
            result = runner.run(built_in.serial(chunk.shape, 2), chunk, batches)
    assert all(torch.equal(a, b) for a, b in zip(result.outputs, outputs, strict=True))
    found = [*result.input_grads, *(p.grad for p in layers.parameters())]
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))  # type: ignore[arg-type]
    with torch.no_grad():
        assert not torch.equal(layers[1](layers[0](batches[0])), outputs[0])  # bfloat16 shows


def test_device_streams_without_an_accelerator() -> None:
    """Refused, with what to use in their place."""
    if torch.accelerator.is_available():
        assert DeviceStreams() is not None
    else:
        with pytest.raises(NodeStateError, match="use 'threads' or 'inline'"):
            DeviceStreams()


def test_an_accelerator_of_one_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """Apple's is there on many a laptop: the default are threads, and asking for its streams is refused."""
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("mps"))
    assert isinstance(make_streams(StreamKind.AUTO), ThreadStreams)
    with pytest.raises(NodeStateError, match="needs an accelerator with streams and none is available"):
        make_streams(StreamKind.CUDA)
    seen: list[str] = []
    ThreadStreams[_Task]().run(_tasks((COMM, NO_WAIT)), lambda task, _: seen.append(threading.current_thread().name))
    assert seen == ["layernodes-comm"]


def test_the_host_runs_ahead_of_a_device() -> None:
    """By two runs; it waits for the device where somebody looks at the times, and once."""
    with stand_in_device():
        streams = DeviceStreams[_Task](torch.device("cuda"))
        tasks = _tasks((COMPUTE, NO_WAIT), (COMM, 0))
        StandInEvent.num_awaited = 0
        awaited, spans = [], []
        for _ in range(4):
            spans.append(streams.run(tasks, lambda task, lane: None))
            awaited.append(StandInEvent.num_awaited)
        assert awaited == [0, 0, 1, 2]
        assert list(spans[0]) == [(0.0, 0.0)] * 2
        assert (len(spans[0]), spans[0][1], spans[0][:1]) == (2, (0.0, 0.0), [(0.0, 0.0)])
        assert StandInEvent.num_awaited == 3


def test_the_comm_thread_works_where_the_caller_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Current device and stream are of each thread; a rank's are not the first ones. Left alone until somebody uses the
    accelerator, which would take memory on it."""
    tasks = _tasks((COMPUTE, NO_WAIT), (COMM, 0))
    for is_used in (True, False):
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda is_used=is_used: is_used)
        with stand_in_device() as device:
            seen: list[bool] = []

            def perform(_: object, __: object, device: Any = device, seen: list[bool] = seen) -> None:
                seen.append(threading.current_thread().name in device.stream.threads)

            ThreadStreams[_Task]().run(tasks, perform)
            assert seen == [False, is_used]
            assert device.stream.threads == []


def test_both_streams_are_of_the_device_of_the_run() -> None:
    """A process that makes its runner and then goes to the device of its rank."""
    with stand_in_device() as device:
        streams = DeviceStreams[_Task]()
        device.stream.device = torch.device("cuda:1")
        used = []
        streams.run(_tasks((COMPUTE, NO_WAIT), (COMM, 0)), lambda task, lane: used.append(device.stream))
        assert [stream.device for stream in used] == [torch.device("cuda:1")] * 2
        assert used[0] is not used[1]


class _Both(torch.nn.Module):
    """Two products of one input; the input itself, in float32, goes on."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = Linear(3, 3), Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        """x + q(x) k(x)."""
        output: Tensor = x + self.q(x) * self.k(x)
        return output


class _BothNode(ScheduleNode):
    """All of it; the second time it is the handoff that goes into the products."""

    slot = Slot.MLP
    stream = StreamType.COMPUTE
    writes: ClassVar[HandoffMap] = {"x": Tensor}

    def __init__(self, layer: Any) -> None:
        self.both = layer[0]

    def forward(self, ctx: NodeContext, *inputs: Tensor) -> Tensor:
        output: Tensor = self.both(inputs[0])
        self.put(ctx, "x", output)
        return output.detach() + output


class _AgainNode(ScheduleNode):
    slot = Slot.MOE_COMBINE
    stream = StreamType.COMM
    reads: ClassVar[HandoffMap] = {"x": Tensor}

    def __init__(self, layer: Any) -> None:
        self.both = layer[1]

    def forward(self, ctx: NodeContext, *inputs: Tensor) -> Tensor:
        taken: Any = self.take(ctx, "x")
        output: Tensor = self.both(taken) + inputs[0]
        return output


@pytest.mark.parametrize("streams", ["inline", "threads"])
def test_what_goes_into_two_products_under_autocast(streams: str) -> None:
    """Inputs and handoffs are cast for each, as the plain layer casts them; no cast outlives its slot."""
    torch.manual_seed(4)
    layers = torch.nn.ModuleList([torch.nn.ModuleList([_Both(), _Both()]) for _ in range(2)])
    batches = [torch.randn(4, 3, requires_grad=True) for _ in range(2)]
    nodes = {Slot.MLP: _BothNode, Slot.MOE_COMBINE: _AgainNode}
    chunk = ChunkPlan.of([LayerPlan.build(layer, nodes=nodes) for layer in layers])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        outputs = []
        for batch in batches:
            output = batch
            for first, second in layers:
                middle = first(output)
                output = second(middle) + (middle.detach() + middle)
            outputs.append(output.detach())
            output.backward(torch.ones_like(output))
        expected = [batch.grad for batch in batches] + [p.grad for p in layers.parameters()]
        layers.zero_grad()
        with Runner(streams=streams) as runner:
            result = runner.run(built_in.serial(chunk.shape, 2), chunk, batches)
    assert all(torch.equal(a, b) for a, b in zip(result.outputs, outputs, strict=True))
    found = [*result.input_grads, *(p.grad for p in layers.parameters())]
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))  # type: ignore[arg-type]
