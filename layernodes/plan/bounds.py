"""Makespans that no schedule can beat.

::

    chain    the longest line, each W after its B
    stream   all steps of a stream, after the shortest way to its first step, before the shortest way from its last
    both     with slow-downs s of computation and c of communication: in each second in which both streams run, they do
             1 / s and 1 / c of a second's work, so that it saves 1 / s + 1 / c - 1 of it. There are at most
             min(s C, c M) such seconds, for C seconds of computation and M of communication, which take at least

                 C + M - min(s C, c M) (1 / s + 1 / c - 1),   or C + M where the streams had better take turns

``two_lines`` has one more, for two lines.
"""

from __future__ import annotations

from layernodes.plan.problem import Problem


def lower_bound(problem: Problem, *, slowdowns: tuple[float, float] = (1.0, 1.0)) -> float:
    """The largest of the bounds chain, stream and both; 0 for a problem without steps.

    Args:
        problem: the problem.
        slowdowns: of computation, and of communication.
    """
    lines = problem.lines
    chain = max((line.tail[0] for line in lines), default=0.0)
    compute = comm = 0.0
    if problem.compute_total > 0:
        compute = problem.compute_total + min(line.to_compute[0] for line in lines) + _after_last(problem, comm=False)
    if problem.comm_total > 0:
        comm = problem.comm_total + min(line.to_comm[0] for line in lines) + _after_last(problem, comm=True)
    return max(chain, compute, comm, _both(problem, *slowdowns))


def _both(problem: Problem, s: float, c: float) -> float:
    longest = min(s * problem.compute_total, c * problem.comm_total)
    return problem.compute_total + problem.comm_total - longest * max(1 / s + 1 / c - 1, 0.0)


def _after_last(problem: Problem, *, comm: bool) -> float:
    """Least seconds that must pass after the last step of a stream: one of the lines has it, or a class of W."""
    if any(wgrad.comm is comm for wgrad in problem.classes):
        return 0.0
    ways = []
    for line in problem.lines:
        last = max((index for index, on_comm in enumerate(line.comm) if on_comm is comm), default=None)
        if last is not None:
            ways.append(line.tail[last] - line.seconds[last])
    return min(ways, default=0.0)
