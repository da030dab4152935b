"""Search over orders of steps, one step at a time; exact if it never had to drop a state.

Contract. A state is a set of launched steps with the moments at which the two streams and the lines are free. Level k
holds the states with k steps::

    level = {nothing launched}
    for each step:
        level = {state + step for state in level for step in choices(state)}
        of states with the same steps, drop those that are nowhere earlier than another
        drop states whose lower bound is no better than the best schedule known
        keep the ``width`` most promising

What makes it exact where ``width`` is never reached:

* Same steps, nowhere earlier: whatever order completes the one also completes the other, no step later. The bytes held
  depend on the launched steps alone, so a memory limit allows the same.
* ``choices`` without memory limit and with queues of their own are those of Giffler and Thompson (Operations Research
  8, 1960): of all steps that could be next, take the one that would end first, at e, and branch over the steps of its
  stream that could start before e. Launching any other on that stream would leave a hole in which that one fits, and
  to fill it delays nothing. Otherwise all steps that could be next.
* Lines that are alike, in seconds and in bytes, never overtake each other: where the later one could, exchanging what
  remains of the two changes no time, as they arrived in order on the same stream, and neither the streams nor the bytes
  along the launch order, so that it holds for one queue, for a memory limit, and for the two lines of a pair too.
* ``W``s: see ``problem``.

States are ranked by the lower bound, then by how far both streams and all lines are behind in sum.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, final

from layernodes.plan.partial_schedule import State, Trail, add
from layernodes.plan.problem import NO_CLASS, Problem

_MANY_CLASSES: Final = 6


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class SearchLimits:
    """What a search may use.

    Attributes:
        width: states kept a level.
        in_flight: lines at work at once; None: any number.
        memory: bytes held at most; None: any number.
        one_queue: whether launches wait for the start of the launch before.
        below: only schedules with a smaller makespan are of interest.
        guide: the line of each step that is no ``W``, in order: only where ``W``s go is searched. None: everything.
    """

    width: int
    in_flight: int | None = None
    memory: int | None = None
    one_queue: bool = False
    below: float = float("inf")
    guide: tuple[int, ...] | None = None


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class SearchResult:
    """What a search found.

    Attributes:
        order: ids of the steps of the best schedule found, or None if there is none below ``below``.
        complete: no state was dropped for want of width: there is no better schedule.
        num_states: states made.
        stopped: it was stopped before its end.
    """

    order: tuple[int, ...] | None
    complete: bool
    num_states: int
    stopped: bool = False


def search(problem: Problem, limits: SearchLimits, stop: Callable[[int], bool]) -> SearchResult:
    """Search for a schedule.

    Args:
        problem: the problem.
        limits: what the search may use.
        stop: asked once a level, with the number of states made so far, whether to give up.
    """
    return _Search(problem, limits).run(stop)


class _Search:
    def __init__(self, problem: Problem, limits: SearchLimits) -> None:
        self.problem = problem
        self.limits = limits
        self.complete = limits.guide is None
        self.branch_all = limits.memory is not None or limits.one_queue

    def run(self, stop: Callable[[int], bool]) -> SearchResult:
        problem, limits = self.problem, self.limits
        lines = len(problem.lines)
        level = [
            State(
                (0,) * lines,
                (0,) * len(problem.classes),
                0.0,
                0.0,
                (0.0,) * lines,
                0.0,
                problem.compute_total,
                problem.comm_total,
                problem.held,
                None,
            )
        ]
        num_states = 0
        for _ in range(problem.num_steps):
            if stop(num_states):
                return SearchResult(order=None, complete=False, num_states=num_states, stopped=True)
            fronts: dict[tuple[tuple[int, ...], tuple[int, ...]], list[State]] = {}
            for state in level:
                for choice in self.choices(state):
                    after = self.launch(state, choice)
                    if after is not None:
                        num_states += 1
                        add(fronts.setdefault((after.positions, after.pending), []), after)
            ranked = [(*self.rank(state), state) for front in fronts.values() for state in front]
            ranked = [entry for entry in ranked if entry[0] < limits.below]
            if len(ranked) > limits.width:
                self.complete = False
                ranked.sort(key=lambda entry: entry[:2])
                del ranked[limits.width :]
            level = [entry[2] for entry in ranked]
            if not level:
                return SearchResult(order=None, complete=self.complete, num_states=num_states)
        best = min(level, key=lambda state: max(state.compute_free, state.comm_free))
        return SearchResult(order=self.order(best.trail), complete=self.complete, num_states=num_states)

    def choices(self, state: State) -> list[int]:
        """The choices to branch over."""
        problem, limits = self.problem, self.limits
        found: list[tuple[float, float, bool, int]] = []
        started = 0
        in_front = None
        guided = None if limits.guide is None else limits.guide[sum(state.positions) : sum(state.positions) + 1]
        for number, line in enumerate(problem.lines):
            if guided is not None and number not in guided:
                continue
            position = state.positions[number]
            behind = problem.alike and in_front is not None and position >= in_front
            in_front = position
            if position == len(line.ids) or behind:
                continue
            if limits.in_flight is not None:
                started += 1
                if started > limits.in_flight:
                    self.complete = False
                    break
            comm = line.comm[position]
            start = max(state.ready[number], state.comm_free if comm else state.compute_free)
            found.append((start + line.seconds[position], start, comm, number))
        classes = [number for number, count in enumerate(state.pending) if count]
        if len(classes) > _MANY_CLASSES:
            classes = self.few(classes, state, found)
        for number in classes:
            wgrad = problem.classes[number]
            start = state.comm_free if wgrad.comm else state.compute_free
            found.append((start + wgrad.seconds, start, wgrad.comm, len(problem.lines) + number))
        if self.branch_all or not found:
            return [choice for _, _, _, choice in found]
        end, _, stream, first = min(found)
        return [choice for _, start, comm, choice in found if comm is stream and (start < end or choice == first)]

    def few(self, classes: list[int], state: State, found: list[tuple[float, float, bool, int]]) -> list[int]:
        """Of many classes: the longest, the shortest, and the longest that fits before the next computation."""
        self.complete = False
        by_length = sorted(classes, key=lambda number: (self.problem.classes[number].seconds, number))
        gap = min((start for _, start, comm, _ in found if not comm), default=state.compute_free) - state.compute_free
        fitting = [number for number in by_length if self.problem.classes[number].seconds <= gap]
        return sorted({by_length[0], by_length[-1], *fitting[-1:]})

    def launch(self, state: State, choice: int) -> State | None:
        """The state after one more step, or None where its bytes do not fit."""
        problem = self.problem
        positions, pending, ready = state.positions, state.pending, state.ready
        number_of_lines = len(problem.lines)
        if choice < number_of_lines:
            line = problem.lines[choice]
            position = positions[choice]
            comm, seconds = line.comm[position], line.seconds[position]
            start = max(state.ready[choice], state.comm_free if comm else state.compute_free)
            if self.limits.one_queue:
                start = max(start, state.launched)
            end = start + seconds
            positions = (*positions[:choice], position + 1, *positions[choice + 1 :])
            ready = (*ready[:choice], end, *ready[choice + 1 :])
            kind = line.wgrad[position]
            if kind != NO_CLASS:
                pending = (*pending[:kind], pending[kind] + 1, *pending[kind + 1 :])
            held = state.held + line.acquires[position]
            if self.limits.memory is not None and held > self.limits.memory:
                return None
            held -= line.releases[position]
        else:
            kind = choice - number_of_lines
            wgrad = problem.classes[kind]
            comm, seconds = wgrad.comm, wgrad.seconds
            start = state.comm_free if comm else state.compute_free
            if self.limits.one_queue:
                start = max(start, state.launched)
            end = start + seconds
            pending = (*pending[:kind], pending[kind] - 1, *pending[kind + 1 :])
            held = state.held - wgrad.releases
        return State(
            positions,
            pending,
            state.compute_free if comm else end,
            end if comm else state.comm_free,
            ready,
            start if self.limits.one_queue else 0.0,
            state.compute_left if comm else state.compute_left - seconds,
            state.comm_left - seconds if comm else state.comm_left,
            held,
            (state.trail, choice),
        )

    def rank(self, state: State) -> tuple[float, float]:
        """A lower bound of every completion, and how far behind the state is."""
        next_compute = next_comm = float("inf")
        bound = max(state.compute_free, state.comm_free)
        behind = 0.0
        for line, position, ready in zip(self.problem.lines, state.positions, state.ready, strict=True):
            tail = ready + line.tail[position]
            bound = max(bound, tail)
            behind += tail
            next_compute = min(next_compute, ready + line.to_compute[position])
            next_comm = min(next_comm, ready + line.to_comm[position])
        for wgrad, count in zip(self.problem.classes, state.pending, strict=True):
            if count and wgrad.comm:
                next_comm = 0.0
            elif count:
                next_compute = 0.0
        if next_compute < float("inf"):
            compute = max(state.compute_free, next_compute) + state.compute_left
            bound = max(bound, compute)
            behind += compute
        if next_comm < float("inf"):
            comm = max(state.comm_free, next_comm) + state.comm_left
            bound = max(bound, comm)
            behind += comm
        return bound, behind

    def order(self, trail: Trail) -> tuple[int, ...]:
        """The ids of the steps that a trail of choices launches."""
        choices: list[int] = []
        while trail is not None:
            trail, choice = trail
            choices.append(choice)
        problem = self.problem
        positions = [0] * len(problem.lines)
        available: list[deque[int]] = [deque() for _ in problem.classes]
        order: list[int] = []
        for choice in reversed(choices):
            if choice < len(problem.lines):
                line, position = problem.lines[choice], positions[choice]
                positions[choice] += 1
                order.append(line.ids[position])
                if line.wgrad[position] != NO_CLASS:
                    available[line.wgrad[position]].append(problem.wgrad_ids[line.ids[position]])
            else:
                order.append(available[choice - len(problem.lines)].popleft())
        return tuple(order)
