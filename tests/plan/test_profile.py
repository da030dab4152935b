"""Profiling: exact on a clock of its own, alike on all ranks, and without a trace in the model."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest
import torch
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from torch.nn import Dropout

import layernodes
from benchmarks._live import LiveBytes
from layernodes import CostModel, NodeContext, OptionError, Runner, schedules
from layernodes.plan.chunk_plan import ChunkPlan
from layernodes.plan.schedule import Schedule
from layernodes.plan.simulate import simulate
from layernodes.plan.timeline import Interval, Timeline
from layernodes.slots import StreamType
from tests.support.configs import by_name
from tests.support.costs import random_costs
from tests.support.fixtures import MEGATRON_WORLD, megatron_world  # noqa: F401
from tests.support.ranks import values_on_ranks
from tests.support.runs import Bench
from tests.support.toy import Middle, chunk_of, inputs, toys
from tests.support.virtual import VirtualStreams

pytestmark = MEGATRON_WORLD

COMM = ("moe_dispatch", "moe_combine")


def one_after_another(schedule: Schedule, seconds: dict[str, Sequence[float]], repetition: int) -> Timeline:
    """Nothing overlaps; a step takes what stands under its phase and slot for the repetition, by default 1 s."""
    at, intervals = 0.0, []
    for step in schedule:
        took = seconds.get(f"{step.phase}.{step.slot}", [1.0] * 9)[repetition]
        stream = StreamType.COMM if step.slot in COMM else StreamType.COMPUTE
        intervals.append(Interval(step, stream, at, at + took))
        at += took
    return Timeline(tuple(intervals))


def test_medians_and_spread_without_the_warm_up() -> None:
    """Worked out by hand: of 1, 2 and 9 s the median is 2, and half are within 50 % of it; the warm-up is forgotten."""
    seconds = {
        "F.mlp": [700, 1, 2, 9],
        "B.mlp": [700, 4, 4, 4],
        "W.mlp": [700, 8, 10, 11],
        "F.moe_dispatch": [7, 3, 1, 2],
    }
    streams = VirtualStreams(lambda number, schedule: one_after_another(schedule, seconds, number // 2))
    chunk = ChunkPlan.of(chunk_of(toys(2)).layers, wgrad="auto")
    costs = layernodes.profile(chunk, inputs(1)[0], repetitions=3, warmup=1, streams=streams, name="mine")
    assert [len(run) for run in streams.runs] == [20, 60] * 4  # one microbatch, then three
    assert (costs.name, costs.compute_slowdown, costs.hardware_queues) == ("mine", 1, 2)
    for slots in (costs.kinds["moe"], costs.layers[0], costs.layers[1]):
        assert (slots["mlp"].F, slots["mlp"].B, slots["mlp"].W) == (2, 4, 10)
        assert (slots["moe_dispatch"].F, slots["moe_dispatch"].B, slots["moe_dispatch"].W) == (2, 1, 0)
    found = costs.measurement
    assert found is not None
    assert (found.repetitions, found.warmup, found.num_ranks, found.streams) == (3, 1, 1, "VirtualStreams")
    assert (found.layers[1]["mlp"].F, found.layers[1]["mlp"].B, found.layers[1]["mlp"].W) == (0.5, 0, 0.1)
    assert found.layers[0]["moe_dispatch"].W is None
    assert (found.typical_spread, found.largest_spread) == (0, 0.5)
    assert CostModel.from_json(costs.to_json()) == costs


def test_a_hand_over_is_part_of_what_a_step_costs() -> None:
    """Steps of 1 s with 0.25 s between two of them: each takes 1.25 s, but for the last one."""

    def with_gaps(_: int, schedule: Schedule) -> Timeline:
        close = one_after_another(schedule, {}, 0).intervals
        return Timeline(
            tuple(Interval(i.step, i.stream, 1.25 * n, 1.25 * n + 1) for n, i in enumerate(close)),
        )

    chunk = ChunkPlan.of(chunk_of(toys(1)).layers)
    costs = layernodes.profile(chunk, inputs(1)[0], repetitions=1, warmup=0, streams=VirtualStreams(with_gaps))
    assert costs.layers[0]["mlp"].F == costs.layers[0]["moe_dispatch"].B == 1.25
    assert costs.layers[0]["pre_dispatch_computation"].B == 1  # the last
    serial = schedules.serial(chunk.shape, 1)
    assert simulate(serial, costs, chunk.shape).makespan == with_gaps(0, serial).makespan


@pytest.mark.parametrize("slowdowns", [(1.0, 1.0), (1.5, 1.0), (4.0, 1.0), (1.0, 1.5), (1.25, 2.0)], ids=str)
@pytest.mark.parametrize("wgrad", ["off", "auto"])
def test_slow_down_is_found(slowdowns: tuple[float, float], wgrad: str) -> None:
    """Runs that took what a simulation with slow-downs says give back its costs and its slow-downs."""
    chunk = ChunkPlan.of(chunk_of(toys(2)).layers, wgrad=wgrad)
    true = random_costs(chunk.shape, random.Random(4), slowdowns=slowdowns)
    streams = VirtualStreams(lambda _, schedule: simulate(schedule, true, chunk.shape))
    costs = layernodes.profile(chunk, inputs(1)[0], repetitions=2, warmup=0, streams=streams)
    assert (costs.compute_slowdown, costs.communication_slowdown) == pytest.approx(slowdowns, abs=1e-9)
    rounded = costs.model_copy(update={"compute_slowdown": slowdowns[0], "communication_slowdown": slowdowns[1]})
    for schedule in (streams.runs[0], streams.runs[1]):
        predicted = simulate(schedule, rounded, chunk.shape)
        assert [(i.start, i.end) for i in predicted.intervals] == [
            (i.start, i.end) for i in simulate(schedule, true, chunk.shape).intervals
        ]


def test_real_streams() -> None:
    """Steps that sleep cost at least their sleep; deferred weight gradients cost too."""
    layers = toys(1)
    layers[0].fuse.seconds = 3e-3
    chunk = ChunkPlan.of(chunk_of(layers).layers, wgrad="auto")
    costs = layernodes.profile(chunk, inputs(1)[0], repetitions=3, warmup=1, streams="threads")
    for slot, cost in costs.kinds["moe"].items():
        assert 3e-3 <= cost.F < 1
        assert 3e-3 <= cost.B < 1
        assert (0 < cost.W < 1) is (slot in ("pre_dispatch_computation", "mlp"))
    assert costs.measurement is not None
    assert costs.measurement.streams == "threads"


class Counted(Middle):
    """Draws random numbers, and counts its forwards in a buffer and in a counter of Megatron-Core's routers."""

    def __init__(self, layer: torch.nn.Module) -> None:
        super().__init__(layer)  # type: ignore[arg-type]
        self.layer = layer

    def forward(self, ctx: NodeContext, *inputs: torch.Tensor) -> torch.Tensor:
        self.layer.count += 1  # type: ignore[operator]
        self.layer.ga_steps += 1  # type: ignore[operator]
        return Dropout(0.5)(super().forward(ctx, *inputs))

    def touches_rng(self) -> bool:
        return True


def test_the_model_is_left_as_it_was() -> None:
    """Gradients are the same objects with the same values, buffers and generators are put back; after a failure too."""
    (layer,) = toys(1)
    layer.register_buffer("count", torch.zeros(()))
    layer.first.weight.grad = torch.full_like(layer.first.weight, 3.0)
    layer.second.weight.main_grad = torch.full_like(layer.second.weight, 4.0)  # type: ignore[assignment]
    layer.ga_steps = torch.zeros(())

    def gather(weight: torch.Tensor) -> None:  # as Megatron-Core's DDP does
        weight.main_grad.add_(weight.grad)  # type: ignore[attr-defined]
        weight.grad = None
        gathered.append(weight)

    gathered: list[torch.Tensor] = []
    layer.second.weight.register_post_accumulate_grad_hook(gather)
    before = layer.first.weight.grad
    chunk = chunk_of([layer], mlp=Counted)
    batch = inputs(1)[0]
    states = [torch.get_rng_state(), dict(get_cuda_rng_tracker().get_states())]

    def check() -> None:
        assert layer.first.weight.grad is before
        assert torch.equal(before, torch.full_like(before, 3.0))
        assert layer.second.weight.grad is None
        assert torch.equal(layer.second.weight.main_grad, torch.full_like(before, 4.0))  # type: ignore[arg-type]
        assert gathered
        assert layer.count == layer.ga_steps == 0
        assert batch.grad is None
        assert torch.equal(torch.get_rng_state(), states[0])
        assert get_cuda_rng_tracker().get_states().keys() == states[1].keys()

    layernodes.profile(chunk, batch, repetitions=1, streams="inline")
    check()
    layer.fuse.armed = ("B", chunk.places[0].slot)  # type: ignore[assignment]
    with pytest.raises(layernodes.StepError, match="planted"):
        layernodes.profile(chunk, batch, repetitions=1, streams="inline")
    check()


def test_a_real_model() -> None:
    """A Megatron-Core model, MTP and all: every slot that does something and both ends cost something."""
    bench = Bench(by_name("mtp-dropout-ep1"))
    bench.reset()
    chunk = bench.chunk(split_combine=True)
    costs = layernodes.profile(chunk, bench.batches()[0], repetitions=2, warmup=1, streams="inline")
    for (layer, slot), cost in costs.table(chunk.shape).items():
        does_nothing = layer is not None and slot in chunk.shape.layers[layer].passthrough
        assert (cost.F > 0 and cost.B > 0) is not does_nothing
    assert all(parameter.grad is None for parameter in bench.model.parameters())


@pytest.mark.parametrize("streams", ["inline", "threads"])
@pytest.mark.parametrize("wgrad", ["off", "auto"])
def test_bytes(streams: str, wgrad: str) -> None:
    """Worked out by hand, in units of a layer's input.

    First keeps what tanh saves and its output; dispatch makes one and lets one go; the second linear's input stays,
    beside it come what sin saves and the output; combine makes one and lets one go. A linear waits for its W with its
    input and its output's gradient; the first input of all is the caller's.
    """
    batch = inputs(1)[0]
    chunk = ChunkPlan.of(chunk_of(toys(2)).layers, wgrad=wgrad)
    costs = layernodes.profile(chunk, batch, repetitions=1, warmup=0, streams=streams)
    names = ("pre_dispatch_computation", "moe_dispatch", "mlp", "moe_combine")
    for layer, waiting in ((0, (1, 0, 2, 0)), (1, (2, 0, 2, 0))):
        slots = [costs.layers[layer][name] for name in names]
        assert [slot.activation_bytes for slot in slots] == [count * batch.nbytes for count in (2, 0, 2, 0)]
        if wgrad == "auto":
            assert [slot.wgrad_bytes for slot in slots] == [count * batch.nbytes for count in waiting]
        else:
            assert not any(slot.wgrad_bytes for slot in slots)
    assert costs.kinds["moe"]["pre_dispatch_computation"].activation_bytes == 2 * batch.nbytes


@pytest.mark.parametrize("order", [schedules.serial, schedules.combined_1f1b])
def test_predicted_peak(order: Callable[..., Schedule]) -> None:
    """The simulator's peak of a real model is what a run's live tensors come to, but for what lives within a step."""
    bench = Bench(by_name("mtp-dropout-ep1"))
    bench.reset()
    chunk = bench.chunk()
    costs = layernodes.profile(chunk, bench.batches()[0], repetitions=1, warmup=1, streams="inline")
    schedule = order(chunk.shape, 3)
    batches = [bench.batches()[0]] * 3
    with Runner("inline") as runner:
        runner.run(schedule, chunk, batches)  # gradients of parameters are there from here on
        with LiveBytes() as counter:
            runner.run(schedule, chunk, batches)
    predicted = simulate(schedule, costs, chunk.shape).peak_activation_bytes
    assert 0.75 * counter.peak < predicted < 1.05 * counter.peak


def test_ranks_agree() -> None:
    """Worked out by hand: the longest computation and the shortest communication of each repetition; all ranks alike.

    A real model on threads too, without a group being named.
    """
    ones = [1.0, 1.0, 1.0]
    others = {
        f"{p}.{s}": ones for p in "FB" for s in ("pre_dispatch_computation", "moe_dispatch", "mlp", "moe_combine")
    }
    seconds = [
        {**others, "F.mlp": [1.0, 5.0, 2.0], "F.moe_dispatch": [9.0, 2.0, 3.0], "B.mlp": [1.0, 1.0, 1.0]},
        {**others, "F.mlp": [4.0, 1.0, 3.0], "F.moe_dispatch": [1.0, 8.0, 5.0], "B.mlp": [2.0, 3.0, 2.0]},
    ]
    first, second = values_on_ranks("tests.support.profile_rank_cases:profiles", seconds, "alltoall-moe-ep2")
    assert first == second
    toy, real = CostModel.from_json(first["toy"]), CostModel.from_json(first["real"])
    slots = toy.layers[0]
    assert (slots["mlp"].F, slots["moe_dispatch"].F, slots["mlp"].B) == (4, 2, 2)  # of 4 5 3, of 1 2 3, of 2 3 2
    assert first["gradients"] == []
    assert toy.measurement is not None
    assert real.measurement is not None
    assert toy.measurement.num_ranks == real.measurement.num_ranks == 2
    assert real.kinds["moe"]["moe_dispatch"].F > 0
    assert real.compute_slowdown >= 1 and real.communication_slowdown >= 1


@pytest.mark.parametrize("options", [{"repetitions": 0}, {"warmup": -1}])
def test_refused(options: dict[str, int]) -> None:
    """Numbers that make no sense are named; nothing has run."""
    with pytest.raises(OptionError, match=r"give 1 repetition or more, and a warm-up of 0 or more"):
        layernodes.profile(chunk_of(toys(1)), inputs(1)[0], **options)  # type: ignore[arg-type]


def test_an_empty_chunk_is_refused() -> None:
    """There is nothing to measure."""
    with pytest.raises(layernodes.CostError, match="no steps were measured"):
        layernodes.profile(ChunkPlan.of([]), inputs(1)[0], streams="inline", repetitions=1)


class _NoMemory(torch.Tensor):
    """A gradient that cannot be copied."""

    def detach(self) -> torch.Tensor:
        raise MemoryError("planted")


def test_no_gradient_is_lost_where_memory_runs_out() -> None:
    """While the gradients that are to be kept are copied, none has been taken away yet."""
    (layer,) = toys(1)
    first, *_, last = layer.parameters()
    first.grad = before = torch.ones_like(first)
    last.main_grad = torch.zeros(1).as_subclass(_NoMemory)  # type: ignore[attr-defined]
    with pytest.raises(MemoryError, match="planted"):
        layernodes.profile(chunk_of([layer]), inputs(1)[0], repetitions=1, streams="inline")
    assert first.grad is before
