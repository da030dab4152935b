"""What an optimization starts from: as much of the built-in schedules as ``optimize`` promises, whatever its limits."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from layernodes.plan import schedules
from layernodes.plan.candidates import group_sizes
from layernodes.plan.costs import CostModel, SlotCost
from layernodes.plan.optimize import optimize_with_report
from layernodes.plan.schedule import Schedule
from layernodes.plan.shape import ChunkShape
from layernodes.plan.simulate import simulate
from layernodes.plan.wgrad import WgradPlace

_SLOTS = ("pre_dispatch_computation", "moe_dispatch", "mlp", "moe_combine")


def drawn_costs(rng: random.Random) -> CostModel:
    """Whole seconds; only computation has weight gradients."""
    return CostModel(
        kinds={
            "moe": {
                name: SlotCost(
                    F=rng.randint(1, 9),
                    B=rng.randint(1, 9),
                    W=0 if "moe" in name else rng.randint(1, 9),
                    activation_bytes=rng.randint(0, 3),
                    wgrad_bytes=1,
                )
                for name in _SLOTS
            }
        }
    )


def by_default(shape: ChunkShape, count: int, mode: str) -> Iterator[Schedule]:
    """The built-in schedules as they come, and Megatron-Core's options."""
    if mode == "forward":
        yield schedules.forward_only(shape, count)
        return
    yield schedules.serial(shape, count)
    yield schedules.forward_forward(shape, count)
    for early in (False, True):
        for megatron in (False, True):
            yield schedules.combined_1f1b(shape, count, early_release=early, megatron_wgrad=megatron)


def promised(shape: ChunkShape, count: int, mode: str, groups: list[int]) -> Iterator[Schedule]:
    """Every built-in schedule that the optimizer promises to be no worse than."""
    yield from by_default(shape, count, mode)
    for group in groups:
        if mode == "forward":
            yield schedules.forward_only(shape, count, group=group)
            continue
        together = schedules.forward_forward(shape, count, group=group)
        yield together
        for place in WgradPlace:
            if any(shape.wgrad_slots):
                yield schedules.deferred(together, shape, place)


@pytest.mark.parametrize("mode", ["train", "forward"])
@pytest.mark.parametrize(("count", "groups"), [(6, [1, 2, 3, 4, 5, 6]), (11, [1, 2, 3, 4, 8, 11])])
def test_never_worse_than_groups(count: int, groups: list[int], mode: str) -> None:
    """Groups of every size of few microbatches, of chosen sizes of many, with each place for weight gradients."""
    for seed in range(8):
        rng = random.Random(seed)
        shape = ChunkShape.of(
            ["moe"] * rng.randint(1, 3), wgrad=rng.random() < 0.5, pre_process=False, post_process=False
        )
        costs = drawn_costs(rng)
        known = [simulate(one, costs, shape) for one in promised(shape, count, mode, groups)]
        peaks = sorted(timeline.peak_activation_bytes for timeline in known)
        for limit in (None, peaks[len(peaks) // 2]):
            best = min(t.makespan for t in known if limit is None or t.peak_activation_bytes <= limit)
            for states in (0, 300):
                found = optimize_with_report(
                    shape, costs, num_microbatches=count, mode=mode, memory_limit=limit, max_states=states
                )
                assert found.makespan <= best, (seed, limit, states)
                assert limit is None or found.peak_activation_bytes <= limit


@pytest.mark.parametrize("mode", ["train", "forward"])
def test_no_time_is_enough_for_the_defaults(mode: str) -> None:
    """Without any time it is no worse than the built-in schedules as they come."""
    for seed in range(20):
        rng = random.Random(seed)
        shape = ChunkShape.of(["moe"] * rng.randint(1, 3), wgrad=rng.random() < 0.5)
        costs, count = drawn_costs(rng), rng.randint(1, 5)
        found = optimize_with_report(shape, costs, num_microbatches=count, mode=mode, time_limit=0)
        best = min(simulate(one, costs, shape).makespan for one in by_default(shape, count, mode))
        assert found.makespan <= best, seed


@pytest.mark.parametrize(
    ("count", "sizes"),
    [(1, []), (2, [2]), (8, [2, 3, 4, 5, 6, 7, 8]), (9, [2, 3, 4, 8, 9]), (32, [2, 3, 4, 8, 16, 32])],
)
def test_group_sizes(count: int, sizes: list[int]) -> None:
    """All of few; of many 3, powers of two, and all."""
    assert list(group_sizes(count)) == sizes
