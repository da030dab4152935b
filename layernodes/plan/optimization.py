"""One optimization under way: the best schedule so far, the bound so far, and what may still be spent.

Used by ``optimize``, which states the contract.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final, final

from layernodes.errors import ScheduleError
from layernodes.plan.beam import SearchLimits, SearchResult, search
from layernodes.plan.bounds import lower_bound
from layernodes.plan.candidates import Candidate
from layernodes.plan.costs import CostModel
from layernodes.plan.optimized import Optimized, Progress
from layernodes.plan.problem import Problem, build_problem
from layernodes.plan.rules import Rules
from layernodes.plan.schedule import PairSchedule, Schedule
from layernodes.plan.simulate import simulate_steps
from layernodes.plan.step import Step
from layernodes.plan.two_lines import solve_two_lines
from layernodes.plan.units import in_bytes

MAX_STATES: Final = 300_000
"""How many states the searches make where there is no time limit."""

_FIRST_WIDTHS: Final = (1, 8)
_MANY_STEPS: Final = 6_000
_MANY_LINES: Final = 4
_IN_FLIGHT: Final = 3
_MAX_LABELS: Final = 1_000_000
_GUIDED_WIDTH: Final = 32
_TOLERANCE: Final = 1e-9
_SECONDS_BETWEEN_PROGRESS: Final = 0.1


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Effort:
    """What an optimization may spend, and whom it tells.

    Attributes:
        memory_limit: bytes of live activations at most.
        deadline: ``time.monotonic`` at which to stop; None: never.
        max_states: states that the searches may make; None: any number.
        progress: called now and then.
    """

    memory_limit: int | None = None
    deadline: float | None = None
    max_states: int | None = MAX_STATES
    progress: Callable[[Progress], None] | None = None

    @property
    def is_over(self) -> bool:
        """Whether the deadline has passed."""
        return self.deadline is not None and time.monotonic() >= self.deadline


@final
class Optimization[S: (Schedule, PairSchedule)]:
    """The state of one optimization.

    Args:
        make: ``Schedule`` or ``PairSchedule``.
        rules: the rules of what it makes.
        costs: the costs.
        effort: what it may spend.

    Raises:
        CostError: a slot has no cost.
    """

    def __init__(self, make: type[S], rules: Rules, costs: CostModel, effort: Effort) -> None:
        self._make: type[S] = make
        self._rules = rules
        self._costs = costs
        self._effort = effort
        self._problem = build_problem(rules, costs)
        self._slowdowns = (costs.compute_slowdown, costs.communication_slowdown)
        self._bound = lower_bound(self._problem, slowdowns=self._slowdowns)
        self._best: S | None = None
        self._makespan = float("inf")
        self._peak = 0
        self._found_by = ""
        self._least_peak: int | None = None
        self._candidates: dict[str, float] = {}
        self._seen: set[tuple[Step, ...]] = set()
        self._num_states = 0
        self._began = time.monotonic()
        self._told = self._began

    @property
    def is_optimal(self) -> bool:
        """Whether the best schedule so far meets the bound."""
        return self._makespan * (1 - _TOLERANCE) <= self._bound

    @property
    def _below(self) -> float:
        """Only makespans below this one are better by more than rounding."""
        return self._makespan * (1 - _TOLERANCE)

    def consider(self, candidates: Iterable[Candidate], *, at_least: int = 0) -> None:
        """Judge ready-made schedules, until one is proved best or the time is over.

        Args:
            candidates: the schedules.
            at_least: judge this many of them whatever the time.
        """
        for index, candidate in enumerate(candidates):
            if index >= at_least and (self.is_optimal or self._effort.is_over):
                return
            steps = tuple(candidate.steps)
            if steps in self._seen:
                continue
            self._seen.add(steps)
            makespan = self._judge(candidate.name, steps)
            if makespan is not None:
                self._candidates[candidate.name] = makespan

    def search(self) -> None:
        """Search over orders: narrowly, then along the best order of two lines, then as widely as may be."""
        is_exact = not self._costs.has_slowdown
        if self._problem.num_steps <= _MANY_STEPS:
            self._grow(self._problem, is_exact=is_exact, last=_FIRST_WIDTHS[1], share=0.5)
        guide = self._solve_two_lines()
        if self._problem.num_steps > _MANY_STEPS:
            return
        if guide is not None:
            self._search_width(self._problem, _GUIDED_WIDTH, guide=guide, is_exact=is_exact)
        self._grow(self._problem, is_exact=is_exact, share=1.0 if is_exact else 0.5)
        if not is_exact:
            slowed = build_problem(self._rules, self._costs, factors=self._slowdowns)
            self._grow(slowed, is_exact=False)

    def report(self) -> Optimized[S]:
        """The result.

        Raises:
            ScheduleError: nothing fits into the memory limit.
        """
        if self._best is None:
            limit = self._effort.memory_limit
            found = "" if self._least_peak is None else f"; the least that was found needs {in_bytes(self._least_peak)}"
            raise ScheduleError(f"no schedule found that holds at most {limit} bytes of activations{found}")
        optimal = self.is_optimal
        return Optimized(
            schedule=self._best,
            makespan=self._makespan,
            lower_bound=self._makespan if optimal else self._bound,
            optimal=optimal,
            peak_activation_bytes=self._peak,
            found_by=self._found_by,
            candidates=self._candidates,
            num_states=self._num_states,
            stopped_by="optimal" if optimal else "time_limit" if self._effort.is_over else "max_states",
        )

    def _solve_two_lines(self) -> tuple[int, ...] | None:
        """Solve two lines exactly with weight gradients as a filling: for the bound, and for an order to fill."""
        problem = self._problem
        if len(problem.lines) != 2 or self.is_optimal or self._effort.is_over:
            return None
        solved = solve_two_lines(
            *problem.lines,
            problem.classes,
            below=self._below,
            max_labels=_MAX_LABELS,
            stop=lambda: self._effort.is_over,
        )
        if solved is None or isinstance(solved, float):
            self._bound = max(self._bound, self._below if solved is None else solved)
            return None
        self._bound = max(self._bound, solved.makespan)
        return tuple(line for line, _ in solved.order)

    def _grow(self, problem: Problem, *, is_exact: bool, share: float = 1.0, last: int | None = None) -> None:
        """Search with growing width, up to a last one, or until a share of the states that are left is used up."""
        limit = None
        if self._effort.max_states is not None:
            limit = int(self._num_states + share * (self._effort.max_states - self._num_states))
        width = _FIRST_WIDTHS[0] if last is not None or not is_exact else 4 * _FIRST_WIDTHS[1]
        while not self.is_optimal and not self._effort.is_over:
            result = self._search_width(problem, width, limit=limit, is_exact=is_exact)
            if result.complete and is_exact:
                self._bound = self._makespan
            if result.complete or result.stopped or width == last:
                return
            grown = _FIRST_WIDTHS[1] if width == _FIRST_WIDTHS[0] else width * 4
            if limit is not None:
                affordable = int(width * (limit - self._num_states) / max(1, result.num_states))
                if affordable < 2 * width:
                    return
                grown = min(grown, affordable)
            width = grown

    def _search_width(
        self,
        problem: Problem,
        width: int,
        *,
        is_exact: bool,
        limit: int | None = None,
        guide: tuple[int, ...] | None = None,
    ) -> SearchResult:
        """One search; what it finds is judged, and its states are counted."""
        limits = SearchLimits(
            width=width,
            in_flight=_IN_FLIGHT if len(problem.lines) > _MANY_LINES else None,
            memory=self._effort.memory_limit,
            one_queue=self._costs.hardware_queues == 1,
            below=self._below if is_exact else float("inf"),
            guide=guide,
        )

        def stop(num_states: int) -> bool:
            total = self._num_states + num_states
            self._tell(total)
            return self._effort.is_over or (limit is not None and total > limit)

        result = search(problem, limits, stop)
        self._num_states += result.num_states
        if result.order is not None:
            name = f"search of width {width}" + (" along the best order of two lines" if guide else "")
            self._judge(name, problem.steps(result.order))
        return result

    def _judge(self, name: str, steps: tuple[Step, ...]) -> float | None:
        """Simulate a schedule and keep it if it fits and is better; None where it does not fit."""
        schedule = self._make(steps)
        timeline = simulate_steps(schedule, self._costs, self._rules)
        peak = timeline.peak_activation_bytes
        self._least_peak = peak if self._least_peak is None else min(peak, self._least_peak)
        if self._effort.memory_limit is not None and peak > self._effort.memory_limit:
            return None
        if timeline.makespan < self._makespan:
            self._best, self._makespan, self._peak, self._found_by = schedule, timeline.makespan, peak, name
            self._tell(self._num_states, now=True)
        return timeline.makespan

    def _tell(self, num_states: int, *, now: bool = False) -> None:
        moment = time.monotonic()
        if self._effort.progress is None or (not now and moment < self._told + _SECONDS_BETWEEN_PROGRESS):
            return
        self._told = moment
        self._effort.progress(
            Progress(
                seconds=moment - self._began,
                num_states=num_states,
                makespan=self._makespan,
                lower_bound=min(self._bound, self._makespan),
            )
        )
