"""The optimizer: never worse than the built-ins, as good as a constraint solver, honest about its bound."""

from __future__ import annotations

import random
import statistics
import time
from types import SimpleNamespace
from typing import Any  # Any: what the two-line method is called with is passed on

import pytest

import layernodes.plan.optimize as optimize_module
from layernodes.errors import ScheduleError
from layernodes.plan import optimization, pairs, schedules
from layernodes.plan.bounds import lower_bound
from layernodes.plan.costs import CostModel, SlotCost
from layernodes.plan.optimize import optimize, optimize_pair, optimize_pair_with_report, optimize_with_report
from layernodes.plan.optimized import Optimized, Progress
from layernodes.plan.presets import PRESETS
from layernodes.plan.problem import build_problem
from layernodes.plan.rules import Rules
from layernodes.plan.schedule import PairSchedule, Schedule
from layernodes.plan.shape import ChunkShape
from layernodes.plan.simulate import simulate
from layernodes.plan.timeline import Timeline
from layernodes.plan.two_lines import TwoLines, solve_two_lines
from layernodes.plan.validate import validate, validate_pair
from layernodes.slots import Phase, StreamType
from tests.support.costs import random_costs
from tests.support.cpsat import best_makespan
from tests.support.strategies import plain


def random_shape(rng: random.Random, *, max_layers: int) -> ChunkShape:
    """Dense, MoE and MTP layers, with and without ends and deferral."""
    kinds = [rng.choice(["moe", "moe", "dense"]) for _ in range(rng.randint(1, max_layers))]
    return ChunkShape.of(
        kinds,
        mtp=rng.randint(0, 1) if len(kinds) < max_layers else 0,
        pre_process=rng.random() < 0.3,
        post_process=rng.random() < 0.3,
        wgrad=rng.choice([False, True, True, ["mlp"]]),
    )


def uneven_costs(shape: ChunkShape, rng: random.Random) -> CostModel:
    """Costs as real numbers: alike in all layers of a kind, or of each layer's own."""
    if rng.random() < 0.5:
        return random_costs(
            shape,
            rng,
            queues=rng.choice([1, 2, 2]),
            slowdowns=rng.choice([(1.0, 1.0), (1.0, 1.0), (1.3, 1.0), (1.2, 1.3)]),
        )
    kinds = {
        kind: {
            slot: SlotCost(
                F=rng.uniform(0, 2), B=rng.uniform(0, 2), W=rng.uniform(0, 2), activation_bytes=rng.randint(0, 9)
            )
            for layer in shape.layers
            for slot in layer.slot_names
        }
        for kind in ("moe", "dense")
    }
    return CostModel(
        kinds=kinds,
        hardware_queues=rng.choice([1, 2, 2]),
        compute_slowdown=rng.choice([1.0, 1.3]),
        communication_slowdown=rng.choice([1.0, 1.0, 1.2]),
    )


def check_never_worse(seed: int) -> None:
    rng = random.Random(seed)
    shape = random_shape(rng, max_layers=3)
    costs = uneven_costs(shape, rng)
    n = rng.randint(1, 3)
    found = optimize_with_report(shape, costs, num_microbatches=n, max_states=1_000)
    validate(found.schedule, shape, num_microbatches=n)
    assert simulate(found.schedule, costs, shape).makespan == found.makespan
    for early in (False, True):
        for megatron in (False, True):
            known = schedules.combined_1f1b(shape, n, early_release=early, megatron_wgrad=megatron)
            assert found.makespan <= simulate(known, costs, shape).makespan
    assert found.makespan <= simulate(schedules.serial(shape, n), costs, shape).makespan
    assert found.lower_bound <= found.makespan
    pair = optimize_pair_with_report(shape, shape, costs, max_states=1_000)
    validate_pair(pair.schedule, shape, shape)
    for early in (False, True):
        for megatron in (False, True):
            other = pairs.combined_1f1b(shape, shape, early_release=early, megatron_wgrad=megatron)
            assert pair.makespan <= simulate(other, costs, shape).makespan
    assert pair.makespan <= simulate(pairs.serial(shape, shape), costs, shape).makespan


@pytest.mark.parametrize("first", range(0, 100, 20))
def test_never_worse_than_the_built_ins(first: int) -> None:
    """On random shapes and costs, with one and two hardware queues, with and without slow-down."""
    for seed in range(first, first + 20):
        check_never_worse(seed)


@pytest.mark.full
@pytest.mark.parametrize("first", range(100, 1_000, 100))
def test_never_worse_than_the_built_ins_on_many(first: int) -> None:
    """The same on 900 more."""
    for seed in range(first, first + 100):
        check_never_worse(seed)


def solver_says(
    timeline: Timeline, shape: ChunkShape, costs: CostModel, *, pair: bool, memory_limit: int | None = None
) -> int:
    """What CP-SAT finds for the steps of a timeline."""
    chunk, other = plain(shape), plain(shape)
    texts = {str(i.step): i for i in timeline.intervals}
    held = 0
    if pair:
        held = sum(i.releases for i in timeline.intervals if i.step.phase is Phase.B)
    return best_makespan(
        list(texts),
        {text: round(i.duration) for text, i in texts.items()},
        {text for text, i in texts.items() if i.stream is StreamType.COMM},
        {text: other if pair and i.step.phase is not Phase.F else chunk for text, i in texts.items()},
        launch_order=costs.hardware_queues == 1,
        held_at_start=held,
        acquires={text: i.acquires for text, i in texts.items()},
        releases={text: i.releases for text, i in texts.items()},
        memory_limit=memory_limit,
    )


def check_against_solver(seed: int, *, layers_of_chunks: int) -> None:
    """Two microbatches of a chunk, and pairs of two layers; with one queue, and with a memory limit."""
    rng = random.Random(seed)
    pair = rng.random() < 0.5
    shape = random_shape(rng, max_layers=2 if pair else layers_of_chunks)
    costs = random_costs(shape, rng, queues=rng.choice([1, 2, 2]))
    found: Optimized[Schedule] | Optimized[PairSchedule]
    if pair:
        known = simulate(pairs.serial(shape, shape), costs, shape)
    else:
        known = simulate(schedules.serial(shape, 2), costs, shape)
    limit = None if rng.random() < 0.6 else known.peak_activation_bytes + rng.randint(0, 20)
    if pair:
        found = optimize_pair_with_report(shape, shape, costs, memory_limit=limit)
    else:
        found = optimize_with_report(shape, costs, memory_limit=limit)
    assert limit is None or found.peak_activation_bytes <= limit
    assert found.optimal, seed
    assert found.makespan == solver_says(known, shape, costs, pair=pair, memory_limit=limit), seed


@pytest.mark.parametrize("first", range(0, 24, 8))
def test_as_good_as_a_constraint_solver(first: int) -> None:
    """The optimizer proves its result best, and CP-SAT finds the same makespan."""
    for seed in range(first, first + 8):
        check_against_solver(seed, layers_of_chunks=1)


@pytest.mark.full
@pytest.mark.parametrize("first", range(24, 224, 25))
def test_as_good_as_a_constraint_solver_on_many(first: int) -> None:
    """The same on 200 more."""
    for seed in range(first, first + 25):
        check_against_solver(seed, layers_of_chunks=2)


def test_memory_limits_hold_and_cost_time() -> None:
    """A tighter limit never gives a shorter makespan; below what any schedule needs it is an error with that number."""
    rng = random.Random(5)
    shape = ChunkShape.of(["moe"] * 2, wgrad=True, pre_process=False, post_process=False)
    costs = random_costs(shape, rng)
    least = simulate(schedules.serial(shape, 3), costs).peak_activation_bytes
    makespans = []
    for limit in (None, 3 * least, 2 * least, least + 5, least):
        found = optimize_with_report(shape, costs, num_microbatches=3, memory_limit=limit)
        assert limit is None or found.peak_activation_bytes <= limit
        makespans.append(found.makespan)
    assert makespans == sorted(makespans)
    with pytest.raises(ScheduleError, match=f"at most {least - 1} bytes.*needs {least} B"):
        optimize(shape, costs, num_microbatches=3, memory_limit=least - 1)


def test_two_lines_alone_are_solved_exactly() -> None:
    """Without weight gradients the two-line method finds what CP-SAT finds; with them, never more."""
    for seed in range(15):
        rng = random.Random(seed)
        shape = random_shape(rng, max_layers=2)
        costs = random_costs(shape, rng)
        rules = Rules.of_pair(shape, shape)
        problem = build_problem(rules, costs)
        solved = solve_two_lines(*problem.lines, problem.classes)
        assert isinstance(solved, TwoLines)
        best = solver_says(simulate(pairs.serial(shape, shape), costs, shape), shape, costs, pair=True)
        assert lower_bound(problem) <= best
        assert solved.makespan <= best
        if not problem.wgrad_ids:
            assert solved.makespan == best
        assert solve_two_lines(*problem.lines, problem.classes, below=solved.makespan) is None
        given_up = solve_two_lines(*problem.lines, problem.classes, max_labels=5)
        assert isinstance(given_up, TwoLines) or (isinstance(given_up, float) and given_up <= best)


def test_two_lines_are_left_when_time_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """Told to stop, the two-line method gives a bound; an optimization tells it when its time is over."""
    shape = ChunkShape.of(["moe"] * 8, wgrad=True)
    costs = random_costs(shape, random.Random(2), highest=10**6)
    problem = build_problem(Rules.of_pair(shape, shape), costs)
    best = solve_two_lines(*problem.lines, problem.classes)
    stopped = solve_two_lines(*problem.lines, problem.classes, stop=iter([False] * 9 + [True]).__next__)
    assert isinstance(best, TwoLines)
    assert isinstance(stopped, float)
    assert 0 < stopped <= best.makespan
    now, found = [0.0], []

    def slow(*args: Any, **options: Any) -> TwoLines | float | None:
        now[0] += 1
        found.append(solve_two_lines(*args, **options))
        return found[-1]

    monkeypatch.setattr(optimization, "solve_two_lines", slow)
    monkeypatch.setattr(optimization, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(optimize_module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    hasty = optimize_pair_with_report(shape, shape, costs, time_limit=1)
    assert hasty.stopped_by == "time_limit"
    assert [type(one) for one in found] == [float]


def test_bounds_of_a_slow_down() -> None:
    """C + M (1 - 1/s): computation of 8 s and communication of 4 s at s = 2 take at least 10 s."""
    shape = ChunkShape.of(["moe"] * 2, pre_process=False, post_process=False)
    costs = CostModel.simple(computation=1, communication=0.5, backward=1, wgrad=0, compute_slowdown=2)
    problem = build_problem(Rules.of_pair(shape, shape), costs)
    assert (problem.compute_total, problem.comm_total) == (8, 4)
    assert lower_bound(problem, slowdowns=(2, 1)) == 10
    found = optimize_pair_with_report(shape, shape, costs, max_states=5_000)
    assert found.makespan >= found.lower_bound >= 10


@pytest.mark.parametrize("s, c, least", [(1, 2, 8), (1, 4, 10), (2, 2, 12), (1.25, 1.25, 9), (4, 4, 12)])
def test_bounds_of_both_slow_downs(s: float, c: float, least: float) -> None:
    """Worked out by hand, of 8 s of computation and 4 s of communication.

    At 1 and 2, 4 s of communication fill the 8 s; at 1 and 4, 2 s do, and 2 s are left; at 2 and 2 running side by side
    saves nothing, and at 4 and 4 taking turns is better; at 5/4 each, 5 s of both do 4 s of each, and 4 s are left.
    """
    shape = ChunkShape.of(["moe"] * 2, pre_process=False, post_process=False)
    costs = CostModel.simple(
        computation=1, communication=0.5, backward=1, wgrad=0, compute_slowdown=s, communication_slowdown=c
    )
    problem = build_problem(Rules.of_pair(shape, shape), costs)
    assert lower_bound(problem, slowdowns=(s, c)) == pytest.approx(least)
    found = optimize_pair_with_report(shape, shape, costs, max_states=5_000)
    assert found.makespan >= found.lower_bound - 1e-9 >= least - 1e-6


def test_deterministic() -> None:
    """The same result, in every respect, whenever there is no time limit."""
    shape = ChunkShape.of(["dense", "moe", "moe"], mtp=1, wgrad=True)
    costs = uneven_costs(shape, random.Random(4))
    first, second = (optimize_with_report(shape, costs, num_microbatches=3, max_states=5_000) for _ in range(2))
    assert first == second


def test_time_limit_and_progress() -> None:
    """No time at all still gives the best of the well-known schedules; progress only ever improves."""
    shape = ChunkShape.of(["moe"] * 8, wgrad=True)
    costs = random_costs(shape, random.Random(3))
    seen: list[Progress] = []
    hasty = optimize_with_report(shape, costs, num_microbatches=3, time_limit=0, progress=seen.append)
    known = schedules.combined_1f1b(shape, 3, megatron_wgrad=True)
    assert hasty.makespan <= simulate(known, costs).makespan
    assert hasty.stopped_by in ("time_limit", "optimal")
    start = time.monotonic()
    found = optimize_with_report(shape, costs, num_microbatches=3, time_limit=0.5, progress=seen.append)
    assert time.monotonic() - start < 10
    assert found.makespan <= hasty.makespan
    assert seen
    assert seen[-1].makespan == found.makespan
    assert seen[-1].gap >= 0


def test_many_microbatches() -> None:
    """Pairs and groups are repeated; the result is valid and within five percent of the bound."""
    shape = ChunkShape.of(["moe"] * 4, wgrad=True)
    costs = CostModel.simple(computation=1, communication=1.2)
    found = optimize_with_report(shape, costs, num_microbatches=9, max_states=20_000)
    validate(found.schedule, shape, num_microbatches=9)
    assert found.gap < 0.05
    assert "the best group of two, repeated" in found.candidates


def test_forward_only_and_empty() -> None:
    """Forward-only chunks, pairs with one side, and nothing at all."""
    shape = ChunkShape.of(["moe"] * 3, wgrad=True)
    costs = CostModel.simple(computation=1, communication=1)
    forward = optimize_with_report(shape, costs, num_microbatches=2, mode="forward")
    validate(forward.schedule, shape, num_microbatches=2, mode="forward")
    assert forward.optimal
    assert forward.makespan == 13
    validate_pair(optimize_pair(shape, None, costs), shape, None)
    validate_pair(optimize_pair(None, shape, costs), None, shape)
    with pytest.raises(ScheduleError, match="num_microbatches=0; give 1 or more"):
        optimize(shape, costs, num_microbatches=0)
    assert optimize_pair(None, None, costs) == PairSchedule()


@pytest.mark.parametrize("name", ["memory_limit", "time_limit", "max_states"])
def test_bad_limits(name: str) -> None:
    """Named, with what to give."""
    with pytest.raises(ScheduleError, match=f"{name}=-1; give 0 or more"):
        optimize(ChunkShape.of(["moe"]), CostModel.simple(computation=1, communication=1), **{name: -1})  # type: ignore[arg-type]


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_solved(name: str) -> None:
    """61 layers and 2 microbatches, and a pair, of each preset: at most 1 % above the bound."""
    shape, costs = PRESETS[name].shape(num_layers=61), PRESETS[name].costs()
    found = optimize_with_report(shape, costs)
    pair = optimize_pair_with_report(shape, shape, costs)
    assert found.gap <= 0.01
    assert pair.gap <= 0.01


@pytest.mark.full
@pytest.mark.parametrize("wgrad", [False, True])
@pytest.mark.parametrize("name", PRESETS)
def test_time(name: str, wgrad: bool) -> None:
    """61 layers x 2 microbatches in under 10 s of processor time, median of 5, at most 1 % above the bound."""
    shape, costs = PRESETS[name].shape(num_layers=61, wgrad=wgrad), PRESETS[name].costs()
    taken = []
    for _ in range(5):
        start = time.process_time()
        assert optimize_with_report(shape, costs).gap <= 0.01
        taken.append(time.process_time() - start)
    assert statistics.median(taken) < 10


@pytest.mark.full
def test_where_it_gains() -> None:
    """Where costs are uneven and communication is long, the chosen pair beats Megatron-Core's order by 10 %."""
    slots = {
        "pre_dispatch_computation": SlotCost(F=1.1, B=1.1, W=0.66),
        "moe_dispatch": SlotCost(F=1.8, B=1.8),
        "mlp": SlotCost(F=1.7, B=1.7, W=1.7),
        "moe_combine": SlotCost(F=2.1, B=2.1),
    }
    shape, costs = ChunkShape.of(["moe"] * 12, wgrad=True), CostModel(kinds={"moe": slots})
    found = optimize_pair_with_report(shape, shape, costs)
    megatron = pairs.combined_1f1b(shape, shape, megatron_wgrad=True)
    assert found.optimal
    assert simulate(megatron, costs).makespan > 1.1 * found.makespan
