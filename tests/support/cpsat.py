"""The best makespan of small instances, found by OR-tools' CP-SAT: a judge of the optimizer.

What must come before what is asked of the oracle, not of the package.
"""

from __future__ import annotations

from itertools import combinations

from ortools.sat.python import cp_model

from tests import oracle


def best_makespan(
    steps: list[str],
    seconds: dict[str, int],
    comm: set[str],
    chunks: dict[str, oracle.Chunk],
    *,
    launch_order: bool = False,
    held_at_start: int = 0,
    acquires: dict[str, int] | None = None,
    releases: dict[str, int] | None = None,
    memory_limit: int | None = None,
) -> int:
    """The smallest makespan of any order of these steps.

    Args:
        steps: texts of the steps.
        seconds: whole seconds of each.
        comm: those on the communication stream.
        chunks: the chunk that each step is of, by step.
        launch_order: starts may not go back along the order in which steps are launched (one hardware queue).
        held_at_start, acquires, releases, memory_limit: bytes, by the order in which steps are launched.
    """
    model = cp_model.CpModel()
    horizon = sum(seconds.values())
    start = {s: model.new_int_var(0, horizon, s) for s in steps}
    interval = {s: model.new_fixed_size_interval_var(start[s], seconds[s], s) for s in steps}
    launched = launch_order or memory_limit is not None  # only then does it matter who of two streams comes first
    turn = {s: model.new_int_var(0, len(steps) - 1, f"turn {s}") for s in steps if launched}
    model.add_all_different(list(turn.values()))
    for stream in ([s for s in steps if s in comm], [s for s in steps if s not in comm]):
        model.add_no_overlap([interval[s] for s in stream])
    first: dict[tuple[str, str], cp_model.BoolVarT] = {}
    for a, b in combinations(steps, 2):
        first[a, b] = model.new_bool_var(f"{a} first")
        first[b, a] = first[a, b].negated()
    for (a, b), a_first in first.items():
        if launched:
            model.add(turn[a] < turn[b]).only_enforce_if(a_first)
        if (a in comm) == (b in comm):
            model.add(start[b] >= start[a] + seconds[a]).only_enforce_if(a_first)
        elif launch_order:
            model.add(start[b] >= start[a]).only_enforce_if(a_first)
        same_chunk = chunks[a] is chunks[b]
        if same_chunk and oracle.must_precede(a, b, chunks[a]):
            model.add(a_first == 1)
            model.add(start[b] >= start[a] + seconds[a])
        if a[0] == b[0] == "W" and oracle.split(a)[2:] == oracle.split(b)[2:]:
            model.add(a_first == first["B" + a[1:], "B" + b[1:]])
    if memory_limit is not None and acquires is not None and releases is not None:
        for s in steps:
            model.add(
                held_at_start + acquires[s] + sum((acquires[o] - releases[o]) * first[o, s] for o in steps if o != s)
                <= memory_limit
            )
    makespan = model.new_int_var(0, horizon, "makespan")
    for s in steps:
        model.add(makespan >= start[s] + seconds[s])
    model.minimize(makespan)
    return _solve(model)


def _solve(model: cp_model.CpModel) -> int:
    """The objective's best value; -1 where nothing is feasible."""
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 2
    solver.parameters.random_seed = 1
    status = solver.solve(model)
    if status == cp_model.INFEASIBLE:
        return -1
    assert status == cp_model.OPTIMAL, solver.status_name(status)
    return round(solver.objective_value)
