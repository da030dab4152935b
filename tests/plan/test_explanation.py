"""Explanations: the causes added up, and what would help, by simulation."""

from __future__ import annotations

import pytest

import layernodes
from layernodes.plan import pairs, schedules
from layernodes.plan.costs import CostModel
from layernodes.plan.explanation import Explanation
from layernodes.plan.schedule import PairSchedule, Schedule
from layernodes.plan.shape import ChunkShape
from layernodes.plan.simulate import simulate
from layernodes.plan.timeline import Timeline

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


def test_nothing_exposed() -> None:
    """Says so; nothing helps where computation alone fills the time."""
    costs = CostModel.simple(computation=2, communication=0)
    found = layernodes.explain(simulate(schedules.serial(SHAPE, 2), costs), costs)
    assert found.causes == ()
    assert "nothing that was tried would help" in str(found)
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
