"""Costs of measured timelines: what a simulated run took gives the costs that it was simulated with."""

from __future__ import annotations

import random

import pytest

from layernodes.errors import CostError
from layernodes.plan import schedules
from layernodes.plan.measured import costs_of_timelines
from layernodes.plan.shape import ChunkShape
from layernodes.plan.simulate import simulate
from layernodes.plan.timeline import Interval, Timeline
from tests.support.costs import random_costs


@pytest.mark.parametrize("wgrad", [False, True, ["mlp"]])
def test_round_trip(wgrad: bool | list[str]) -> None:
    """Simulated with the costs read off it, another schedule takes the same time; medians forget an outlier."""
    shape = ChunkShape.of(["dense", "moe", "moe"], mtp=1, wgrad=wgrad, split_combine=True)
    costs = random_costs(shape, random.Random(1))
    runs = [simulate(schedules.serial(shape, 3), costs, shape) for _ in range(3)]
    slow = Timeline(tuple(Interval(i.step, i.stream, 2 * i.start, 2 * i.end) for i in runs[0].intervals))
    found = costs_of_timelines([*runs, slow], shape)
    for schedule in (schedules.combined_1f1b(shape, 3), schedules.forward_forward(shape, 3)):
        expected = [i.duration for i in simulate(schedule, costs, shape).intervals]
        assert [i.duration for i in simulate(schedule, found, shape).intervals] == expected
    assert found.measurement is not None
    assert found.measurement.repetitions == 4
    assert found.measurement.typical_spread == found.measurement.largest_spread == 0


def test_kinds_are_medians_over_layers() -> None:
    """So that the costs serve a deeper model of the same kinds."""
    shape = ChunkShape.of(["moe"] * 3, pre_process=False, post_process=False)
    costs = random_costs(shape, random.Random(2))
    found = costs_of_timelines([simulate(schedules.serial(shape, 1), costs, shape)], shape)
    middle = sorted(costs.layers[layer]["mlp"].F for layer in range(3))[1]
    assert middle == found.kinds["moe"]["mlp"].F
    assert "mtp_post_process" not in found.kinds["moe"]


def test_refused() -> None:
    """Nothing measured; steps of another chunk."""
    shape = ChunkShape.of(["moe"], pre_process=False, post_process=False)
    with pytest.raises(CostError, match="no steps were measured"):
        costs_of_timelines([Timeline(())], shape)
    other = ChunkShape.of(["moe"] * 2)
    timeline = simulate(schedules.serial(other, 1), random_costs(other, random.Random(1)), other)
    with pytest.raises(CostError, match=r"F0\.pre_process was measured"):
        costs_of_timelines([timeline], shape)
