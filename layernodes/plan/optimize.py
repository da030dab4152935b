"""Chooses a schedule for given costs: the best one where that can be proved, a good one with a proven bound elsewhere.

Contract::

    candidates = the built-in schedules, groups of several sizes too, with every place for weight gradients
                 many microbatches: the best pair, and the best group of two, repeated
                 two lines: their best order, and a search for where its weight gradients go     (``two_lines``)
                 searches of growing width, step by step over all orders                         (``beam``)
    result     = the candidate with the smallest simulated makespan that fits into the memory limit
    bound      = the largest of ``bounds`` and ``two_lines``; the result itself where a search was complete

It ends when the result meets the bound, when a search was complete, when ``max_states`` are used up, or at the time
limit. Without a time limit it is deterministic: ``max_states`` counts work, not time.

With slow-downs above 1 the searches ignore the slow-down, or apply it everywhere, and the simulator judges
what they find; the result is then proved best only if it meets the bound.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from layernodes.errors import ArgumentError, ScheduleError
from layernodes.plan import candidates, schedules
from layernodes.plan.arguments import check_argument
from layernodes.plan.costs import CostModel
from layernodes.plan.optimization import MAX_STATES, Effort, Optimization
from layernodes.plan.optimized import Optimized, Progress
from layernodes.plan.rules import Mode, Rules
from layernodes.plan.schedule import PairSchedule, Schedule
from layernodes.plan.shape import ChunkShape


def optimize(
    shape: ChunkShape,
    costs: CostModel,
    *,
    num_microbatches: int = 2,
    mode: Mode | str = Mode.TRAIN,
    memory_limit: int | None = None,
    time_limit: float | None = None,
    max_states: int | None = None,
    progress: Callable[[Progress], None] | None = None,
) -> Schedule:
    """Choose the schedule of a chunk: never worse than the built-in ones that fit into the memory limit.

    Those are, with each place for weight gradients, ``serial``, ``combined_1f1b`` with its options but ``order``, and
    ``forward_forward``, or ``forward_only``, in groups of any size where there are up to 8 microbatches, else of 1, 2,
    3, powers of two, and all. A time limit that ends before all are judged still leaves each as it comes by default,
    and the options of ``combined_1f1b``. ``max_states`` leaves all.

    Args:
        shape: the chunk's shape.
        costs: what each step costs.
        num_microbatches: number of microbatches.
        mode: ``"train"`` or ``"forward"``.
        memory_limit: bytes of live activations at most (``Timeline.peak_activation_bytes``); None: any number.
        time_limit: seconds after which to return the best so far; None: no limit, and the same result every time.
        max_states: how much to search; None: ``MAX_STATES``, or as much as the time limit allows.
        progress: called now and then, and whenever something better is found.

    Raises:
        CostError: a slot has no cost.
        ScheduleError: no schedule was found that fits into the memory limit; or a bad shape, mode or limit.
    """
    return optimize_with_report(
        shape,
        costs,
        num_microbatches=num_microbatches,
        mode=mode,
        memory_limit=memory_limit,
        time_limit=time_limit,
        max_states=max_states,
        progress=progress,
    ).schedule


def optimize_pair(
    forward_shape: ChunkShape | None,
    backward_shape: ChunkShape | None,
    costs: CostModel,
    *,
    memory_limit: int | None = None,
    time_limit: float | None = None,
    max_states: int | None = None,
    progress: Callable[[Progress], None] | None = None,
) -> PairSchedule:
    """Choose the schedule of a pair: ``F0`` of one chunk beside ``B1`` and ``W1`` of another.

    The activations of the backward chunk are held from the start, those of the forward chunk to the end.

    Args:
        forward_shape, backward_shape: shapes of the two chunks; either may be None.
        costs, memory_limit, time_limit, max_states, progress: as for ``optimize``.

    Raises:
        CostError, ScheduleError: as ``optimize``.
    """
    return optimize_pair_with_report(
        forward_shape,
        backward_shape,
        costs,
        memory_limit=memory_limit,
        time_limit=time_limit,
        max_states=max_states,
        progress=progress,
    ).schedule


def optimize_with_report(
    shape: ChunkShape,
    costs: CostModel,
    *,
    num_microbatches: int = 2,
    mode: Mode | str = Mode.TRAIN,
    memory_limit: int | None = None,
    time_limit: float | None = None,
    max_states: int | None = None,
    progress: Callable[[Progress], None] | None = None,
) -> Optimized[Schedule]:
    """As ``optimize``, and says how good the schedule is."""
    effort = _effort(memory_limit, time_limit, max_states, progress)
    check_argument("costs", costs, CostModel)
    rules = Rules.of(shape, num_microbatches, mode)
    trains = rules.mode is Mode.TRAIN
    run = Optimization(Schedule, rules, costs, effort)
    run.consider(
        candidates.built_in_candidates(shape, num_microbatches, trains=trains), at_least=candidates.NUM_WELL_KNOWN
    )
    if trains and num_microbatches > 2 and not run.is_optimal:
        run.consider(_repeated(shape, costs, num_microbatches, effort))
    run.search()
    return run.report()


def optimize_pair_with_report(
    forward_shape: ChunkShape | None,
    backward_shape: ChunkShape | None,
    costs: CostModel,
    *,
    memory_limit: int | None = None,
    time_limit: float | None = None,
    max_states: int | None = None,
    progress: Callable[[Progress], None] | None = None,
) -> Optimized[PairSchedule]:
    """As ``optimize_pair``, and says how good the schedule is."""
    effort = _effort(memory_limit, time_limit, max_states, progress)
    check_argument("costs", costs, CostModel)
    run = Optimization(PairSchedule, Rules.of_pair(forward_shape, backward_shape), costs, effort)
    run.consider(candidates.built_in_pair_candidates(forward_shape, backward_shape), at_least=candidates.NUM_WELL_KNOWN)
    run.search()
    return run.report()


def _repeated(shape: ChunkShape, costs: CostModel, num_microbatches: int, effort: Effort) -> list[candidates.Candidate]:
    """Schedules of many microbatches made of the best ones of two."""
    now = time.monotonic()
    left = None if effort.deadline is None else max(0.0, effort.deadline - now)
    max_states = (MAX_STATES if effort.max_states is None else effort.max_states) // 4
    found = []
    pair = optimize_pair_with_report(
        shape, shape, costs, time_limit=None if left is None else left / 4, max_states=max_states
    )
    found.append(candidates.repeated_turn(shape, num_microbatches, pair.schedule))
    start = schedules.forward_only(shape, 2, group=2)
    found += candidates.repeated_turn_between_pairs(shape, num_microbatches, pair.schedule, start)
    try:
        group = optimize_with_report(
            shape,
            costs,
            memory_limit=effort.memory_limit,
            time_limit=None if left is None else left / 4,
            max_states=max_states,
        )
    except ScheduleError:  # two microbatches at once do not fit into the memory
        return found
    return [*found, candidates.repeated_group(shape, num_microbatches, group.schedule)]


def _effort(
    memory_limit: int | None,
    time_limit: float | None,
    max_states: int | None,
    progress: Callable[[Progress], None] | None,
) -> Effort:
    for name, value in (("memory_limit", memory_limit), ("time_limit", time_limit), ("max_states", max_states)):
        check_argument(name, value, int, float, type(None))
        if value is not None and not value >= 0:
            raise ScheduleError(f"{name}={value}; give 0 or more, or None")
    if progress is not None and not callable(progress):
        raise ArgumentError(f"progress is {progress!r:.60}; give a function that takes a Progress, or None")
    if max_states is None and time_limit is None:
        max_states = MAX_STATES
    return Effort(
        memory_limit=memory_limit,
        deadline=None if time_limit is None else time.monotonic() + time_limit,
        max_states=max_states,
        progress=progress,
    )
