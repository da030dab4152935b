"""Explanations: the causes added up, and what would help, by simulation."""

from __future__ import annotations

from dataclasses import replace

import pytest

import layernodes
from layernodes.errors import ScheduleError
from layernodes.plan import pairs, schedules
from layernodes.plan.causes import Cause, ExposedBecause
from layernodes.plan.costs import CostModel, SlotCost
from layernodes.plan.explanation import Explanation
from layernodes.plan.infer import infer_rules
from layernodes.plan.moves import move_before
from layernodes.plan.schedule import PairSchedule, Schedule
from layernodes.plan.shape import ChunkShape, LayerShape
from layernodes.plan.simulate import simulate
from layernodes.plan.step import Step
from layernodes.plan.timeline import Interval, Timeline
from layernodes.slots import ExtraSlot, Slot, StreamType
from tests import oracle
from tests.support.costs import worked_costs

SHAPE = ChunkShape.of(["moe"], pre_process=False, post_process=False)
COSTS = CostModel.simple(computation=2, communication=2, backward=1, wgrad=0)


def helps(explanation: Explanation) -> dict[str, float]:
    return {one.change: one.makespan for one in explanation.helps}


@pytest.mark.parametrize("measured", [False, True])
def test_worked_by_hand(measured: bool) -> None:
    """One layer, two microbatches, every slot 2 s, serially: 4 x 8 s, half of it exposed.

    Woven, the exchanges follow each other from 2 to 18, and the last attention 18-20. Nothing is quicker: no exchange
    begins before 2, and none ends after the last attention begins. With a link twice as fast a serial pass takes
    2 + 1 + 2 + 1 = 6 s: 24 s in all.
    """
    timeline = simulate(schedules.serial(SHAPE, 2), COSTS)
    found = layernodes.explain(Timeline(timeline.intervals) if measured else timeline, None if measured else COSTS)
    assert (found.makespan, found.compute_busy, found.comm_busy, found.exposed) == (32, 16, 16, 16)
    assert len(found.causes) == 8
    # F0's dispatch could have run beside F1's attention, and so could F0's combine and both of B0's exchanges.
    assert found.by_cause == {"order": 8, "dependency": 8}
    assert helps(found)["a link twice as fast"] == 24
    assert helps(found)["the schedule forward_forward"] == helps(found)["the optimizer's order"] == 20
    assert found.helps[0].saves == 12 / 32
    assert Explanation.model_validate_json(found.model_dump_json()) == found


def test_words() -> None:
    """Shares, causes, the most exposed steps, and what would help, best first."""
    text = str(layernodes.explain(simulate(schedules.serial(SHAPE, 2), COSTS), COSTS))
    assert "exposed communication: 16 s of 32 s (50.0 %)" in text
    assert "8 s  computation could have run beside it, but stands later in the schedule" in text
    assert "  and 3 more" in text
    assert "the optimizer's order: 20 s, 37.5 % less" in text
    assert "communication takes longer" not in text
    slow = COSTS.scale(communication=2)
    text = str(layernodes.explain(simulate(schedules.serial(SHAPE, 2), slow), slow))
    assert "communication takes longer than computation: in any order 16 s of it stay exposed" in text


def test_changes_are_compared_with_the_run_simulated() -> None:
    """A measured run has gaps that no simulation has: what a change saves is of the simulated time, which is said."""
    simulated = simulate(schedules.serial(SHAPE, 2), COSTS)
    late = [replace(one, start=one.start + i, end=one.end + i) for i, one in enumerate(simulated.intervals)]
    found = layernodes.explain(Timeline(late), COSTS)
    assert (found.makespan, found.simulated) == (47, 32)
    assert found.helps[0].saves == 12 / 32
    assert "what would help, simulated (this order, simulated, takes 32 s):" in str(found)
    assert "what would help, simulated:" in str(layernodes.explain(simulated, COSTS))


def test_nothing_exposed() -> None:
    """Says so; nothing helps where computation alone fills the time."""
    costs = CostModel.simple(computation=2, communication=0)
    found = layernodes.explain(simulate(schedules.serial(SHAPE, 2), costs), costs)
    assert found.causes == ()
    assert "no communication is exposed, and no change that was tried makes the run 0.1 % shorter" in str(found)
    assert layernodes.explain(Timeline(())).helps == ()


def test_weight_gradients_and_a_second_microbatch() -> None:
    """Deferral is proposed where its cost is known, a second microbatch where there is one."""
    costs = CostModel.simple(computation=2, communication=2, wgrad=1)
    timeline = simulate(schedules.serial(SHAPE, 1), costs)
    # Serially 8 + 12: B of a computing slot takes 4. Deferred, W of the experts runs beside B of dispatch: 18.
    assert timeline.makespan == 20
    found = helps(layernodes.explain(timeline, costs))
    assert found["weight gradients deferred, in the optimizer's order"] == 18
    assert found["a second microbatch beside it, for each of the two"] < 18
    measured = helps(layernodes.explain(timeline))  # which shows no W
    assert "weight gradients deferred, in the optimizer's order" not in measured


def test_slow_down() -> None:
    """What communication slows down is told."""
    costs = CostModel.simple(computation=2, communication=2, compute_slowdown=2)
    found = helps(layernodes.explain(simulate(schedules.forward_forward(SHAPE, 2), costs), costs))
    assert "computation that communication does not slow down" in found
    slower = costs.model_copy(update={"communication_slowdown": 2.0})
    found = helps(layernodes.explain(simulate(schedules.forward_forward(SHAPE, 2), slower), slower))
    assert "communication that computation does not slow down" in found


def test_pairs() -> None:
    """A pair is optimized as a pair."""
    shape = ChunkShape.of(["moe"] * 2, pre_process=False, post_process=False)
    serial = simulate(pairs.serial(shape, shape), COSTS)
    found = helps(layernodes.explain(serial, COSTS))
    best = layernodes.optimize_pair(shape, shape, COSTS)
    assert isinstance(best, PairSchedule)
    assert found["the optimizer's order"] == simulate(best, COSTS).makespan < serial.makespan


def test_part_of_a_schedule() -> None:
    """Other orders are not tried, for they would not do the same; other costs are."""
    part = Schedule(schedules.serial(SHAPE, 2).steps[:6])
    assert set(helps(layernodes.explain(simulate(part, COSTS), COSTS))) == {"a link twice as fast"}


def test_forward_only() -> None:
    """Forward-only schedules have forward-only changes."""
    costs = CostModel.simple(computation=2, communication=2)
    found = helps(layernodes.explain(simulate(schedules.forward_only(SHAPE, 2), costs), costs))
    assert found["the schedule forward_only, two at a time"] == found["the optimizer's order"] == 10


_FIFO = "F0.L0.a F1.L0.a F1.L0.d F0.L0.d F0.L0.m F1.L0.m F0.L0.c F1.L0.c"


@pytest.mark.parametrize(("combine", "saved"), [(1, 1), (4, 0)])
def test_moves_are_tried_before_they_are_advised(combine: float, saved: float) -> None:
    """Worked by hand: attention 1 s, dispatch 4 s, experts 2 s; F1's experts could run in 6-8, beside F0's dispatch.

    They stand behind F0's, in 12-14. Combines of 1 s then run in 12-13 and 14-15; moved, in 12-13 and 13-14. Combines
    of 4 s run in 12-16 and 16-20, moved or not.
    """
    seconds = {"pre_dispatch_computation": 1, "moe_dispatch": 4, "mlp": 2, "moe_combine": combine}
    costs = CostModel(kinds={"moe": {slot: SlotCost(F=time) for slot, time in seconds.items()}})
    found = layernodes.explain(simulate(Schedule.parse(oracle.long(_FIFO)), costs), costs)
    (cause,) = [one for one in found.causes if one.cause is Cause.ORDER]
    assert (cause.could_run, cause.waiter, cause.saved_seconds) == (("F1.L0.mlp",), "F0.L0.mlp", saved)
    change = "F1.L0.mlp before F0.L0.mlp"
    if saved:
        assert helps(found)[change] == found.makespan - 1 == 14
        assert "stands behind F0.L0.mlp: put it before, which saves 1 s" in str(cause)
    else:
        assert change not in helps(found)
        assert "stands behind F0.L0.mlp, but before it, it would not make the run shorter" in str(cause)


def test_weight_gradients_that_stand_at_the_end() -> None:
    """The oracle's two worked orders: 25 s with W at the end, 23 s beside the next communication."""
    late, early = (
        next(worked for worked in oracle.WORKED if worked["name"] == f"weight gradients {where}")
        for where in ("at the end", "beside the next communication")
    )
    costs = worked_costs(late)
    found = layernodes.explain(simulate(Schedule.parse(oracle.long(late["steps"])), costs), costs)
    assert helps(found)["W0.L0.mlp before B0.L0.pre_dispatch_computation"] == early["makespan"] == 23
    assert [one.saved_seconds for one in found.causes if one.could_run] == [late["makespan"] - early["makespan"]]


def test_communication_that_comes_along() -> None:
    """What could have run needs an exchange behind the waiter, which moves too, with all before it on its stream."""
    order = Schedule.parse(
        oracle.long("F0.L0.a F1.L0.a F2.L0.a F0.L0.d F0.L0.m F2.L0.d F1.L0.d F1.L0.m F2.L0.m F0.L0.c F1.L0.c F2.L0.c")
    )
    rules = infer_rules(order)
    cause = ExposedBecause(
        step="F0.L0.moe_dispatch",
        seconds=1,
        waiter="F0.L0.mlp",
        cause=Cause.ORDER,
        behind=None,
        behind_seconds=0,
        could_run=("F1.L0.mlp",),
        could_run_seconds=1,
    )
    moved = move_before(cause, order, rules)
    assert moved == Schedule.parse(
        oracle.long("F0.L0.a F1.L0.a F2.L0.a F0.L0.d F2.L0.d F1.L0.d F1.L0.m F0.L0.m F2.L0.m F0.L0.c F1.L0.c F2.L0.c")
    )
    own = cause.model_copy(update={"could_run": ("F0.L0.moe_combine",)})
    assert move_before(own, order, rules) is None  # it needs the waiter itself


@pytest.mark.parametrize("communication", [1e-5, 0.3, 1.0, 3.0])
@pytest.mark.parametrize("name", ["serial", "combined_1f1b", "forward_forward"])
def test_advice_and_verdict_agree(name: str, communication: float) -> None:
    """Whatever is advised is shorter, and the verdict says no more than that nothing reaches its threshold."""
    shape = ChunkShape.of(["moe"] * 2, wgrad=True)
    costs = CostModel.simple(computation=1, communication=communication)
    costs = costs.model_copy(update={"ends": {"pre_process": SlotCost(F=1e-6), "post_process": SlotCost(F=1)}})
    order = schedules.BUILT_IN[name](shape, 3)
    found = layernodes.explain(simulate(order, costs), costs, max_states=200)
    for cause in found.causes[:5]:
        moved = move_before(cause, order, infer_rules(order))
        assert (cause.saved_seconds is None) == (moved is None)
        if moved is not None:
            assert cause.saved_seconds == pytest.approx(found.makespan - simulate(moved, costs).makespan, abs=1e-7)
            assert ("put it before, which saves" in str(cause)) == (simulate(moved, costs).makespan < found.makespan)
    assert ("no change that was tried" in str(found)) == (found.helps == ())
    assert "nothing" not in str(found).rpartition("\n\n")[2]


_SLOTS = ("pre_dispatch_computation", "moe_dispatch", "mlp", "moe_combine")
_PASS_THROUGH = ChunkShape.of(["dense", "moe"], pre_process=False, post_process=False)
_OWN_KIND = ChunkShape(
    layers=(LayerShape.of("mine", uses=[Slot.PRE_DISPATCH_COMPUTATION, Slot.MOE_DISPATCH, Slot.MLP]),) * 2,
    pre_process=False,
    post_process=False,
)


def _kinds(*kinds: str) -> CostModel:
    """Costs by hand: each slot 1 s in F and 1 s in B, which is 4 s a pass where all four do something."""
    return CostModel(kinds={kind: dict.fromkeys(_SLOTS, SlotCost(F=1, B=1)) for kind in kinds})


@pytest.mark.parametrize(
    ("shape", "costs", "passes"),
    [(_PASS_THROUGH, _kinds("dense", "moe"), 2 + 4), (_OWN_KIND, _kinds("mine"), 3 + 3)],
    ids=["pass-throughs", "own kind"],
)
@pytest.mark.parametrize("pair", [False, True])
def test_the_shape_of_the_timeline(shape: ChunkShape, costs: CostModel, passes: int, pair: bool) -> None:
    """What was simulated with a shape is explained with it; a trace, which has none, where it is given.

    ``passes``: seconds of a pass through both layers. In order there are two, F and B.
    """
    full = ChunkShape.of(["moe"] * 2, pre_process=False, post_process=False)  # names pass-throughs of the others
    order = pairs.serial(full, full) if pair else schedules.serial(full, 1)
    timeline = simulate(order, costs, shape)
    for found in (
        layernodes.explain(timeline, costs, max_states=200),
        layernodes.explain(Timeline(timeline.intervals), costs, shape, max_states=200),
        layernodes.explain(timeline, max_states=200),
    ):
        assert (found.makespan, found.simulated) == (2 * passes, 2 * passes)
        assert helps(found)["a link twice as fast"] == 2 * passes - found.comm_busy / 2


def test_a_shape_that_does_not_fit() -> None:
    """Says which step it has not."""
    timeline = simulate(schedules.serial(_PASS_THROUGH, 1), _kinds("dense", "moe"))
    with pytest.raises(ScheduleError, match=r"F0\.L1\.pre_dispatch_computation at step 2 is of a layer that does not"):
        layernodes.explain(timeline, None, SHAPE)


def test_one_hardware_queue() -> None:
    """The costs that a timeline shows have its queues: the run itself, simulated, takes what it took."""
    costs = CostModel.simple(computation=1, communication=1.7, hardware_queues=1)
    shape = ChunkShape.of(["moe"] * 2, wgrad=True)
    order = schedules.combined_1f1b(shape, 3)
    timeline = simulate(order, costs)
    assert timeline.makespan > simulate(order, costs.model_copy(update={"hardware_queues": 2})).makespan
    assert layernodes.explain(timeline, max_states=200).simulated == pytest.approx(timeline.makespan)


def test_a_link_twice_as_fast_carries_ones_own_slots_too() -> None:
    """Two layers, each attention 1, own exchange 4, experts 1, F and B: 24 s, of which 16 are exchanges."""
    gather = ExtraSlot("gather", after=Slot.PRE_DISPATCH_COMPUTATION, stream=StreamType.COMM)
    shape = ChunkShape.of(["moe"] * 2, extra_slots=[gather], pre_process=False, post_process=False)
    one = SlotCost(F=1, B=1)
    slots = {"pre_dispatch_computation": one, "gather": SlotCost(F=4, B=4), "mlp": one}
    costs = CostModel(kinds={"moe": {**slots, "moe_dispatch": SlotCost(), "moe_combine": SlotCost()}})
    timeline = simulate(schedules.serial(shape, 1), costs, shape)
    assert timeline.makespan == 24
    assert helps(layernodes.explain(timeline, costs, max_states=200))["a link twice as fast"] == 16


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        ("F0.L0.c F0.L0.d", "F0.L0.moe_combine at step 0 runs before F0.L0.moe_dispatch"),
        ("F0.L0.d F0.L0.c F0.L0.d", "F0.L0.moe_dispatch at step 2 stands at step 0 already"),
    ],
)
def test_steps_of_no_schedule(steps: str, message: str) -> None:
    """As in a trace that was made by hand: the step that is out of place, by name."""
    order = [Step.parse(text) for text in oracle.long(steps).split()]
    timeline = Timeline(tuple(Interval(step, StreamType.COMM, at, at + 1.0) for at, step in enumerate(order)))
    with pytest.raises(ScheduleError, match=message):
        layernodes.explain(timeline)
    with pytest.raises(ScheduleError, match=message):
        _ = timeline.critical_path
