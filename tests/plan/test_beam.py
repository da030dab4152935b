"""The search over orders, where lines are alike or bytes are limited: what it proves best, every order is tried for.

The oracle launches the steps of a few lines in every order by itself: a step starts when its stream and its line are
free, with one queue not before the launch before it, and its bytes must fit.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import NamedTuple

import pytest

from layernodes.plan.costs import CostModel, SlotCost
from layernodes.plan.optimize import optimize_pair_with_report, optimize_with_report
from layernodes.plan.shape import ChunkShape

_SLOTS = ("pre_dispatch_computation", "moe_dispatch", "mlp", "moe_combine", "post_combine")
_COMM = (False, True, False, True, False)


class _Work(NamedTuple):
    """A step: its stream, its seconds, and the bytes that it begins to hold and lets go of."""

    comm: bool
    seconds: int
    acquires: int
    releases: int


def every_order(lines: Sequence[Sequence[_Work]], *, held: int = 0, one_queue: bool = False) -> set[tuple[int, int]]:
    """(makespan, peak) of every order of these lines."""
    count = len(lines)
    states = {((0,) * count, (0,) * count, (0, 0), 0, held, held)}
    for _ in range(sum(map(len, lines))):
        states = {after for state in states for after in _launches(lines, state, one_queue=one_queue)}
    return {(max(free), peak) for _, _, free, _, _, peak in states}


_State = tuple[tuple[int, ...], tuple[int, ...], tuple[int, int], int, int, int]


def _launches(lines: Sequence[Sequence[_Work]], state: _State, *, one_queue: bool) -> list[_State]:
    positions, ready, free, launched, held, peak = state
    found: list[_State] = []
    for line, works in enumerate(lines):
        if positions[line] == len(works):
            continue
        comm, seconds, acquires, releases = works[positions[line]]
        start = max(ready[line], free[comm], launched if one_queue else 0)
        end = start + seconds
        now = held + acquires
        found.append(
            (
                (*positions[:line], positions[line] + 1, *positions[line + 1 :]),
                (*ready[:line], end, *ready[line + 1 :]),
                (free[0], end) if comm else (end, free[1]),
                start,
                now - releases,
                max(peak, now),
            )
        )
    return found


def costs_of(seconds: Sequence[int], backward: Sequence[int], kept: Sequence[int], *, queues: int) -> CostModel:
    """Costs of a layer's slots."""
    slots = {
        name: SlotCost(F=f, B=b, activation_bytes=k)
        for name, f, b, k in zip(_SLOTS, seconds, backward, kept, strict=False)
    }
    return CostModel(kinds={"moe": slots}, hardware_queues=queues)


@pytest.mark.parametrize("queues", [1, 2])
def test_a_pair_of_equal_seconds_and_other_bytes(queues: int) -> None:
    """A layer that takes the same seconds backward as forward: its two lines are alike but for their bytes."""
    shape = ChunkShape.of(["moe"], split_combine=True, pre_process=False, post_process=False)
    for seed in range(12):
        rng = random.Random(seed)
        a, b, c = (rng.randint(0, 3) for _ in range(3))
        seconds, kept = (a, b, c, b, a), [rng.choice((0, 1, 2, 5)) for _ in _SLOTS]
        forward = [_Work(comm, s, k, 0) for comm, s, k in zip(_COMM, seconds, kept, strict=True)]
        backward = [_Work(comm, s, 0, k) for comm, s, k in zip(_COMM, seconds, reversed(kept), strict=True)]
        orders = every_order([forward, backward], held=sum(kept), one_queue=queues == 1)
        costs = costs_of(seconds, seconds, kept, queues=queues)
        for limit in sorted({peak for _, peak in orders}):
            found = optimize_pair_with_report(shape, shape, costs, memory_limit=limit)
            assert found.optimal
            assert found.makespan == min(makespan for makespan, peak in orders if peak <= limit), (seed, limit)


@pytest.mark.parametrize("queues", [1, 2])
def test_microbatches_alike_under_a_limit(queues: int) -> None:
    """Two microbatches of a layer, forward and backward, whose lines are alike, at every limit."""
    shape = ChunkShape.of(["moe"], pre_process=False, post_process=False)
    for seed in range(8):
        rng = random.Random(seed)
        seconds, back, kept = ([rng.randint(0, 4) for _ in range(4)] for _ in range(3))
        forward = [_Work(comm, s, k, 0) for comm, s, k in zip(_COMM, seconds, kept, strict=False)]
        backward = [_Work(comm, s, 0, k) for comm, s, k in zip(_COMM, back, kept, strict=False)]
        orders = every_order([forward + backward[::-1]] * 2, one_queue=queues == 1)
        costs = costs_of(seconds, back, kept, queues=queues)
        for limit in sorted({peak for _, peak in orders}):
            found = optimize_with_report(shape, costs, memory_limit=limit)
            assert found.optimal
            assert found.makespan == min(makespan for makespan, peak in orders if peak <= limit), (seed, limit)


@pytest.mark.parametrize("queues", [1, 2])
def test_forwards_alone_hold_nothing(queues: int) -> None:
    """Three forwards keep nothing for a backward: a limit of no bytes changes nothing."""
    shape = ChunkShape.of(["moe"], pre_process=False, post_process=False)
    for seed in range(10, 26):
        rng = random.Random(seed)
        seconds = [rng.randint(1, 9) for _ in range(4)]
        lines = [[_Work(comm, s, 0, 0) for comm, s in zip(_COMM, seconds, strict=False)]] * 3
        best = min(makespan for makespan, _ in every_order(lines, one_queue=queues == 1))
        costs = costs_of(seconds, seconds, [1] * 4, queues=queues)
        found = optimize_with_report(shape, costs, num_microbatches=3, mode="forward", memory_limit=0)
        assert found.optimal
        assert found.makespan == best, seed
        assert found.peak_activation_bytes == 0
