"""Why communication is exposed, on timelines worked out by hand."""

from __future__ import annotations

import pytest

from layernodes.plan import schedules
from layernodes.plan.causes import Cause, ExposedBecause, find_causes
from layernodes.plan.costs import CostModel, SlotCost
from layernodes.plan.schedule import PairSchedule, Schedule
from layernodes.plan.shape import ChunkShape
from layernodes.plan.simulate import simulate
from layernodes.plan.timeline import Timeline
from layernodes.slots import StreamType
from tests import oracle
from tests.support.costs import worked_costs

Expected = dict[str, tuple[str, str, float, str, float]]
"""By step: cause, behind whom, for how long, what could have run, and what that takes."""

CAUSES: dict[str, Expected] = {
    "forward of one layer: nothing overlaps": {
        "F0.L0.d": ("dependency", "", 0, "", 0),
        "F0.L0.c": ("end", "", 0, "", 0),
    },
    # W of the experts (2 s) and of attention (1 s) stand at the end; attention's is ready too late for B's dispatch.
    "weight gradients at the end": {
        "F0.L0.d": ("dependency", "", 0, "", 0),
        "F0.L0.c": ("dependency", "", 0, "", 0),
        "B0.L0.c": ("dependency", "", 0, "", 0),
        "B0.L0.d": ("order", "", 0, "W0.L0.m", 2),
    },
    "weight gradients beside the next communication": {
        "F0.L0.d": ("dependency", "", 0, "", 0),
        "F0.L0.c": ("dependency", "", 0, "", 0),
        "B0.L0.c": ("dependency", "", 0, "", 0),
        "B0.L0.d": ("dependency", "", 0, "", 0),
    },
    # F1's last combine is ready at 16 and starts at 16: nothing before it is in its way.
    "two forwards interleaved over two layers of equal slots": {"F1.L1.c": ("end", "", 0, "", 0)},
    # F0's dispatch is ready at 1 and starts at 6, behind F1's; F1's experts are ready at 6, and stand behind F0's.
    "a stream is a FIFO: what is ready waits behind what stands before it": {
        "F1.L0.d": ("dependency", "", 0, "", 0),
        "F0.L0.d": ("order", "F1.L0.d", 5, "F1.L0.m", 2),
        "F1.L0.c": ("end", "", 0, "", 0),
    },
    # The dispatches of F1 and F2 are ready at 2 and 3, and start at 6 and 11.
    "three microbatches behind a slow link": {
        "F0.L0.d": ("dependency", "", 0, "", 0),
        "F1.L0.d": ("queue", "F0.L0.d", 4, "", 0),
        "F2.L0.d": ("queue", "F1.L0.d", 8, "", 0),
    },
    "a pair in Megatron-Core's order: everything is hidden": {},
    # B0's combine is ready at 6, F0's forward being over, and starts at 8, behind F1's.
    "two microbatches forward, then backward, with W": {
        "F0.L0.d": ("dependency", "", 0, "", 0),
        "F1.L0.c": ("dependency", "", 0, "", 0),
        "B0.L0.c": ("queue", "F1.L0.c", 2, "", 0),
    },
}


def of(name: str) -> oracle.Worked:
    return next(worked for worked in oracle.WORKED if worked["name"] == name)


def timeline_of(worked: oracle.Worked) -> Timeline:
    kind = PairSchedule if worked.get("pair") else Schedule
    return simulate(kind.parse(oracle.long(worked["steps"])), worked_costs(worked))


def check(found: tuple[ExposedBecause, ...], expected: Expected) -> None:
    seen = {
        one.step: (str(one.cause), one.behind or "", one.behind_seconds, one.could_run, one.could_run_seconds)
        for one in found
    }
    assert seen == {
        oracle.long(step): (
            cause,
            oracle.long(behind),
            behind_seconds,
            tuple(oracle.long(could).split()),
            could_seconds,
        )
        for step, (cause, behind, behind_seconds, could, could_seconds) in expected.items()
    }


@pytest.mark.parametrize("name", CAUSES)
@pytest.mark.parametrize("measured", [False, True])
def test_worked_by_hand(name: str, measured: bool) -> None:
    """Every cause, exactly; a measured timeline, which brings no dependencies, gives the same."""
    worked = of(name)
    timeline = timeline_of(worked)
    if measured:
        timeline = Timeline(timeline.intervals)
    check(find_causes(timeline), CAUSES[name])


def test_longest_first_and_in_words() -> None:
    """The most exposed step stands first; what it says names everybody involved."""
    worked = of("a stream is a FIFO: what is ready waits behind what stands before it")
    found = find_causes(timeline_of(worked))
    assert [one.seconds for one in found] == [4, 4, 1]
    assert str(found[1]).split("; ") == [
        "F0.L0.moe_dispatch is exposed for 4 s, and F0.L0.mlp waits",
        "F0.L0.moe_dispatch waits 5 s for F1.L0.moe_dispatch on the communication stream",
        "F1.L0.mlp could have run beside it (2 s of computation) and stands behind F0.L0.mlp",
    ]
    assert (
        str(found[2])
        == "F1.L0.moe_combine is exposed for 1 s, and the end of the run waits; nothing is left to compute"
    )


def test_no_more_than_would_fill_the_time() -> None:
    """Of the weight gradients (2 s each) that all could run beside 3 s of combine, the first two are named."""
    shape = ChunkShape.of(["moe", "dense", "dense"], wgrad=True, pre_process=False, post_process=False)
    order = schedules.deferred(schedules.serial(shape, 1), shape, "end")
    timeline = simulate(order, CostModel.simple(computation=2, communication=3))
    (combine,) = [one for one in find_causes(timeline) if one.step == "B0.L0.moe_combine"]
    assert combine.cause is Cause.ORDER
    assert combine.could_run == ("W0.L2.mlp", "W0.L2.pre_dispatch_computation")
    assert combine.could_run_seconds == 4
    assert "W0.L2.mlp, W0.L2.pre_dispatch_computation could have run beside it" in str(combine)
    assert "and stand behind" in str(combine)


def test_causes_cover_the_exposed_time() -> None:
    """One for each exposed step, with its seconds and its waiter."""
    shape = ChunkShape.of(["moe"] * 3, wgrad=True)
    timeline = simulate(schedules.combined_1f1b(shape, 3), CostModel.simple(computation=1, communication=1.7))
    found = find_causes(timeline)
    exposures = {str(e.step): (e.seconds, None if e.waiter is None else str(e.waiter)) for e in timeline.exposures}
    assert {one.step: (one.seconds, one.waiter) for one in found} == exposures
    assert {i.stream for i in timeline.intervals if str(i.step) in exposures} == {StreamType.COMM}


def test_what_rounding_leaves_is_no_time() -> None:
    """Each exchange is as long as the computation beside it, 0.3 s beside 0.1 s and 0.2 s, which add up otherwise."""
    compute, comm = SlotCost(F=0.3, B=0.1, W=0.2), SlotCost(F=0.3, B=0.3)
    slots = {"pre_dispatch_computation": compute, "moe_dispatch": comm, "mlp": compute, "moe_combine": comm}
    shape = ChunkShape.of(["moe"] * 6, wgrad=True)
    timeline = simulate(schedules.combined_1f1b(shape, 4), CostModel(kinds={"moe": slots}))
    assert min(one.seconds for one in timeline.exposures) > 0.05
    assert all(one.behind is None or one.behind_seconds > 0.05 for one in find_causes(timeline))
    assert not any(one.cause is Cause.QUEUE for one in find_causes(timeline))
