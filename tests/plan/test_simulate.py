"""The simulator: timelines worked out by hand, and what holds for every schedule."""

from __future__ import annotations

import random
import statistics
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from layernodes.errors import CostError, ScheduleError
from layernodes.plan import pairs, schedules
from layernodes.plan import simulate as simulate_module
from layernodes.plan.costs import CostModel, SlotCost
from layernodes.plan.rules import Rules
from layernodes.plan.schedule import PairSchedule, Schedule
from layernodes.plan.shape import ChunkShape, ExtraSlot
from layernodes.plan.simulate import simulate
from layernodes.plan.timeline import Timeline
from layernodes.slots import Phase, Slot, StreamType
from layernodes.testing import chunk_shapes
from tests import oracle
from tests.support.costs import random_costs, worked_costs
from tests.support.strategies import plain, valid_schedules

COMPUTE, COMM = StreamType.COMPUTE, StreamType.COMM


def texts(text: str) -> list[str]:
    return oracle.long(text).split()


@pytest.mark.parametrize("worked", oracle.WORKED, ids=lambda worked: worked["name"])
def test_worked_by_hand(worked: oracle.Worked) -> None:
    """Every figure of every timeline worked out by hand, exactly, without a shape."""
    kind = PairSchedule if worked.get("pair") else Schedule
    timeline = simulate(kind.parse(oracle.long(worked["steps"])), worked_costs(worked))
    spans = [tuple(map(float, span.split("-"))) for span in worked["spans"].split()]
    assert [str(i.step) for i in timeline.intervals] == texts(worked["steps"])
    assert [(i.start, i.end) for i in timeline.intervals] == spans
    assert timeline.makespan == worked["makespan"]
    assert (timeline.busy(COMPUTE), timeline.busy(COMM)) == worked["busy"]
    assert timeline.idle(COMPUTE) == worked["makespan"] - worked["busy"][0]
    assert timeline.idle(COMM) == worked["makespan"] - worked["busy"][1]
    exposed = {str(e.step): (e.seconds, str(e.waiter or "end")) for e in timeline.exposures}
    assert exposed == {
        oracle.long(step): (seconds, "end" if waiter == "end" else oracle.long(waiter))
        for step, (seconds, waiter) in worked["exposed"].items()
    }
    assert timeline.exposed_communication == sum(seconds for seconds, _ in worked["exposed"].values())
    assert [str(i.step) for i in timeline.critical_path] == texts(worked["critical"])
    assert (timeline.peak_activation_bytes, timeline.peak_live_activations) == worked["peak"]


def test_at_least_ten_worked_by_hand() -> None:
    """As the issue demands."""
    assert len(oracle.WORKED) >= 10


@st.composite
def cases(draw: st.DrawFn, slowdowns: tuple[float, float] = (1.0, 1.0)) -> tuple[ChunkShape, Schedule, CostModel]:
    """A shape, any valid schedule of it, and costs."""
    shape = draw(chunk_shapes(max_layers=3))
    schedule = draw(valid_schedules(shape, draw(st.integers(1, 3))))
    seed = draw(st.integers(0, 2**32 - 1))
    return (
        shape,
        schedule,
        random_costs(shape, random.Random(seed), queues=draw(st.integers(1, 2)), slowdowns=slowdowns),
    )


def longest_chain(timeline: Timeline, shape: ChunkShape, num_microbatches: int) -> float:
    """Seconds of the longest chain of steps that the oracle orders, found by comparing all pairs of steps."""
    steps = [(str(i.step), i.duration) for i in timeline.intervals]
    best: list[float] = []
    for index, (step, seconds) in enumerate(steps):
        before = [best[k] for k in range(index) if oracle.must_precede(steps[k][0], step, plain(shape))]
        best.append(seconds + max(before, default=0))
    return max(best, default=0)


@settings(deadline=None, max_examples=60)
@given(cases())
def test_between_the_bounds(case: tuple[ChunkShape, Schedule, CostModel]) -> None:
    """At least the busiest stream and the longest chain that the oracle knows, at most everything after another."""
    shape, schedule, costs = case
    timeline = simulate(schedule, costs, shape)
    assert timeline.makespan >= max(timeline.busy(COMPUTE), timeline.busy(COMM))
    assert timeline.makespan >= longest_chain(timeline, shape, 3)
    assert timeline.makespan <= timeline.busy(COMPUTE) + timeline.busy(COMM)
    assert timeline.makespan == sum(i.duration for i in timeline.critical_path) or costs.hardware_queues == 1


@settings(deadline=None, max_examples=60)
@given(cases())
def test_keeps_order_and_dependencies(case: tuple[ChunkShape, Schedule, CostModel]) -> None:
    """Each stream is a FIFO, whatever the oracle orders is over before, and no step starts later than it must."""
    shape, schedule, costs = case
    intervals = simulate(schedule, costs, shape).intervals
    chunk = plain(shape)
    for later, interval in enumerate(intervals):
        bounds = [0.0]
        for earlier in intervals[:later]:
            in_order = oracle.must_precede(str(earlier.step), str(interval.step), chunk)
            queue = (earlier.step.phase, earlier.step.layer, earlier.step.slot) == (
                interval.step.phase,
                interval.step.layer,
                interval.step.slot,
            ) and interval.step.phase is Phase.W
            if earlier.stream is interval.stream or in_order or queue:
                bounds.append(earlier.end)
        if costs.hardware_queues == 1 and later:
            bounds.append(intervals[later - 1].start)
        assert interval.start == max(bounds)


@settings(deadline=None, max_examples=60)
@given(cases(), st.data())
def test_removing_a_step_never_raises_the_makespan(
    case: tuple[ChunkShape, Schedule, CostModel], data: st.DataObject
) -> None:
    """For a fixed order, with the slow-down off. (Which slots are deferred stays as it was: the shape says.)"""
    shape, schedule, costs = case
    if not len(schedule):
        return
    gone = data.draw(st.integers(0, len(schedule) - 1))
    rest = schedule[:gone] + schedule[gone + 1 :]
    assert simulate(rest, costs, shape).makespan <= simulate(schedule, costs, shape).makespan


@pytest.mark.parametrize("slowdowns", [(1.5, 1.0), (1.0, 1.25), (1.5, 1.25), (3.0, 2.0)], ids=str)
@settings(deadline=None, max_examples=40)
@given(data=st.data())
def test_slow_down(slowdowns: tuple[float, float], data: st.DataObject) -> None:
    """Each step takes d + o (1 - 1/s) seconds, o of them beside the other stream; never faster than without, where
    running side by side saves time at all."""
    shape, schedule, costs = data.draw(cases(slowdowns=slowdowns))
    timeline = simulate(schedule, costs, shape)
    undisturbed = costs.model_copy(update={"compute_slowdown": 1.0, "communication_slowdown": 1.0})
    plain_timeline = simulate(schedule, undisturbed, shape)
    factor = dict(zip((COMPUTE, COMM), slowdowns, strict=True))
    for slow, quick in zip(timeline.intervals, plain_timeline.intervals, strict=True):
        others = [i for i in timeline.intervals if i.stream is not slow.stream]
        beside = sum(max(0.0, min(slow.end, c.end) - max(slow.start, c.start)) for c in others)
        expected = quick.duration + beside * (1 - 1 / factor[slow.stream])
        assert slow.duration == pytest.approx(expected, abs=1e-9)
    assert timeline.makespan >= plain_timeline.makespan - 1e-9


@settings(deadline=None, max_examples=60)
@given(cases())
def test_the_two_loops_agree(case: tuple[ChunkShape, Schedule, CostModel]) -> None:
    """The loop over events, at a slow-down of 1, finds what the recurrence finds; and two runs agree."""
    shape, schedule, costs = case
    timeline = simulate(schedule, costs, shape)
    spans = simulate_module._run_at_two_rates(
        [i.duration for i in timeline.intervals],
        [i.stream is COMM for i in timeline.intervals],
        timeline.dependencies or (),
        one_queue=costs.hardware_queues == 1,
        slowdowns=(1, 1),
    )
    assert spans == [(i.start, i.end) for i in timeline.intervals]
    assert simulate(schedule, costs, shape) == timeline


@settings(deadline=None, max_examples=60)
@given(cases())
def test_memory(case: tuple[ChunkShape, Schedule, CostModel]) -> None:
    """Bytes by launch order, added up step by step; at the end nothing is held."""
    shape, schedule, costs = case
    timeline = simulate(schedule, costs, shape)
    held, peak = 0, 0
    for interval in timeline.intervals:
        held += interval.acquires
        peak = max(peak, held)
        held -= interval.releases
    assert timeline.peak_activation_bytes == peak
    assert held == 0 or any(layer.passthrough for layer in shape.layers)


@settings(deadline=None, max_examples=60)
@given(chunk_shapes(max_layers=3), st.integers(1, 3), st.sampled_from(["serial", "combined_1f1b", "forward_forward"]))
def test_shape_is_not_needed(shape: ChunkShape, num_microbatches: int, name: str) -> None:
    """The built-in schedules give the same timeline with and without the shape; so do their pairs."""
    costs = random_costs(shape, random.Random(1))
    streams = {slot.name: slot.stream for layer in shape.layers for slot in layer.slots}
    costs = costs.model_copy(update={"streams": streams})
    schedule = schedules.BUILT_IN[name](shape, num_microbatches)
    assert simulate(schedule, costs) == simulate(schedule, costs, shape)
    pair = pairs.BUILT_IN[name](shape, shape)
    assert simulate(pair, costs) == simulate(pair, costs, shape)


def test_a_slot_that_the_shape_does_not_defer_has_its_weight_gradients_in_b() -> None:
    """B takes B + W; deferred, B takes B alone."""
    costs = CostModel(kinds={"dense": {Slot.PRE_DISPATCH_COMPUTATION: SlotCost(F=1, B=2, W=4), Slot.MLP: SlotCost()}})
    for wgrad, expected in ((False, 6), (True, 2)):
        shape = ChunkShape.of(["dense"], wgrad=wgrad, pre_process=False, post_process=False)
        timeline = simulate(schedules.serial(shape, 1), costs)
        found = [i.duration for i in timeline.intervals if str(i.step) == "B0.L0.pre_dispatch_computation"]
        assert found == [expected]


def test_pass_throughs_are_free_where_a_shape_says_so() -> None:
    """A dense layer's dispatch may be named and takes no time."""
    shape = ChunkShape.of(["dense"], pre_process=False, post_process=False)
    costs = CostModel.simple(computation=1, communication=5)
    schedule = Schedule.parse(oracle.long("F0.L0.a F0.L0.d F0.L0.m F0.L0.c"))
    assert simulate(schedule, costs, shape).makespan == 2
    assert simulate(schedule, costs).makespan == 12


def test_parts_of_schedules() -> None:
    """What stands before a part is done; its activations are held."""
    shape = ChunkShape.of(["moe"] * 2, wgrad=True, pre_process=False, post_process=False)
    costs = CostModel.simple(computation=1, communication=1)
    schedule = schedules.serial(shape, 2)
    part = simulate(schedule[8:12], costs)
    assert [str(i.step) for i in part.intervals] == texts("B0.L1.c B0.L1.m W0.L1.m B0.L1.d")
    assert part.makespan == 3
    assert part.peak_live_activations == 3
    assert simulate(schedule[:0], costs).makespan == 0


def test_parts_of_deferred_schedules_need_the_shape() -> None:
    """Cut before its W, a B is B alone with the shape, and B + W without; attention 1 s each, the experts' F 1 s."""
    shape = ChunkShape.of(["dense"], wgrad=True, pre_process=False, post_process=False)
    part = schedules.deferred(schedules.serial(shape, 1), shape, "end")[:4]
    costs = CostModel.simple(computation=1, communication=1)
    assert (simulate(part, costs, shape).makespan, simulate(part, costs).makespan) == (4, 6)


def test_own_slots() -> None:
    """A user's own slot is placed by where it stands, and its stream may be given with the costs."""
    own = [ExtraSlot("gate", after=Slot.MLP, stream=COMM)]
    shape = ChunkShape.of(["dense"], extra_slots=own, pre_process=False, post_process=False)
    costs = CostModel(
        kinds={
            kind: {"pre_dispatch_computation": SlotCost(F=1), "mlp": SlotCost(F=2), "gate": SlotCost(F=3)}
            for kind in ("moe", "dense")
        },
        streams={"gate": COMM},
    )
    schedule = schedules.forward_only(shape, 2, group=2)
    assert simulate(schedule, costs) == simulate(schedule, costs, shape)
    assert [i.stream for i in simulate(schedule[:3], costs).intervals] == [COMPUTE, COMPUTE, COMM]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("F0.L0.m F0.L0.a", "F0.L0.mlp"),
        ("F0.L0.a F0.L0.a", "already"),
        ("F0.L0.a B0.L0.a F0.L0.m", "whole forward"),
        ("F0.L123456.a", "layer 123456"),
        ("F123456.L0.a", "microbatch 123456"),
    ],
)
def test_impossible_orders_are_refused(text: str, message: str) -> None:
    """In the validator's words."""
    with pytest.raises(ScheduleError, match=message):
        simulate(Schedule.parse(oracle.long(text)), CostModel.simple(computation=1, communication=1))


def test_missing_costs_are_named() -> None:
    """Kind, layer and slot, and what to add."""
    costs = CostModel(kinds={"moe": {"mlp": SlotCost()}})
    with pytest.raises(CostError, match=r"no cost for slot 'moe_dispatch' of layer 3.*add kinds\['moe'\]"):
        simulate(Schedule.parse("F0.L3.mlp F0.L3.moe_dispatch".replace("F0.L3.mlp ", "")), costs)
    with pytest.raises(CostError, match="kind 'dense'"):
        simulate(Schedule.parse("F0.L0.mlp"), costs)


def test_measured_timelines_have_a_critical_path() -> None:
    """Without dependencies they are read off the steps."""
    shape = ChunkShape.of(["moe", "dense"], wgrad=True)
    costs = CostModel.simple(computation=2, communication=3)
    for schedule in (schedules.combined_1f1b(shape, 3), pairs.combined_1f1b(shape, shape)):
        timeline = simulate(schedule, costs)
        assert Timeline(timeline.intervals).critical_path == timeline.critical_path


def test_rules_of_inferred_shapes_have_the_same_dependencies() -> None:
    """Also where layers differ and ends are there."""
    shape = ChunkShape.of(["dense", "moe"], mtp=1, wgrad=["mlp"], split_combine=True)
    schedule = schedules.combined_1f1b(shape, 3)
    costs = CostModel.simple(computation=2, communication=3)
    assert simulate(schedule, costs).dependencies == Rules.of(shape, 3).dependencies(schedule)


def seconds_to_simulate(num_layers: int, num_microbatches: int, slowdown: float) -> float:
    """Median of 5, of processor time, so that a busy machine does not count."""
    shape = ChunkShape.of(["moe"] * num_layers, wgrad=True)
    schedule = schedules.combined_1f1b(shape, num_microbatches)
    costs = CostModel.simple(computation=1e-3, communication=8e-4, compute_slowdown=slowdown)
    taken = []
    for _ in range(5):
        start = time.process_time()
        simulate(schedule, costs).summary()
        taken.append(time.process_time() - start)
    return statistics.median(taken)


@pytest.mark.full
@pytest.mark.parametrize("slowdown", [1.0, 1.2])
def test_time(slowdown: float) -> None:
    """61 layers x 64 microbatches in under 2 s, figures included; time grows linearly."""
    whole = seconds_to_simulate(61, 64, slowdown)
    assert whole < 2
    assert whole < 3 * 4 * seconds_to_simulate(61, 16, slowdown)
