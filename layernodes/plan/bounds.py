"""Makespans that no schedule can beat.

::

    chain    the longest line, each W after its B
    stream   all steps of a stream, after the shortest way to its first step, before the shortest way from its last
    both     with compute_slowdown s: C seconds of computation and M of communication take at least C + M (1 - 1 / s),
             since the compute stream does 1 / s of a second's work in each of those M seconds

``two_lines`` has one more, for two lines.
"""

from __future__ import annotations

from layernodes.plan.problem import Problem


def lower_bound(problem: Problem, *, slowdown: float = 1.0) -> float:
    """The largest of the bounds chain, stream and both; 0 for a problem without steps."""
    lines = problem.lines
    chain = max((line.tail[0] for line in lines), default=0.0)
    compute = comm = 0.0
    if problem.compute_total > 0:
        compute = problem.compute_total + min(line.to_compute[0] for line in lines) + _after_last(problem, comm=False)
    if problem.comm_total > 0:
        comm = problem.comm_total + min(line.to_comm[0] for line in lines) + _after_last(problem, comm=True)
    both = problem.compute_total + problem.comm_total * (1 - 1 / slowdown) if slowdown > 1 else 0.0
    return max(chain, compute, comm, both)


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
