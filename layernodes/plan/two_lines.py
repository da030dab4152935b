"""The best order of two lines of steps on two streams, exactly, weight gradients left aside.

This is the job shop of two jobs and two machines, solved by Akers' geometric method (S. B. Akers, "A graphical
approach to production scheduling problems", Operations Research 4, 1956), a shortest path over positions along the
two lines:

    node (i, j)    both lines stand at a boundary: i steps of the one and j of the other are over
    from a node    let both run side by side, until
                     both are at a boundary again: the next node
                     one of them wants a stream on which the other's step s runs or starts: either it waits until s
                     is over, or the other waits with s until the wanted step is over; two next nodes
                     one of them is at its end: the other runs to its own end

Why it is exact: take any schedule, and let each line's steps start as early as the order on each stream allows. Between
two conflicts both lines run without waiting, as the rule does; at a conflict one of the two steps goes first, and in
either case the later line waits at a boundary until that step is over, at which moment both are at a boundary. So every
such schedule is a path, and every path is a schedule. A node's earliest time is enough to know: what follows is only
shifted by it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from layernodes.plan.problem import Line

Node = tuple[int, int]


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class TwoLines:
    """The best order of two lines.

    Attributes:
        makespan: its makespan.
        order: the steps as (line, position along the line), in order of start.
    """

    makespan: float
    order: tuple[tuple[int, int], ...]


def solve_two_lines(first: Line, second: Line, *, below: float = float("inf")) -> TwoLines | None:
    """The best order of two lines, or None if no order has a makespan below the given one.

    Args:
        first, second: the lines; their weight gradients are not looked at.
        below: only orders with a smaller makespan are of interest; a good value saves most of the work.
    """
    lines = (first, second)
    rest = tuple(_rest(line) for line in lines)
    ends = (len(first.ids), len(second.ids))
    layers: list[dict[Node, tuple[float, Node | None]]] = [{} for _ in range(ends[0] + ends[1] + 1)]
    layers[0][0, 0] = 0.0, None
    best, last = below, None
    for layer in layers:
        for node, (now, _) in layer.items():
            if now + max(rest[0][node[0]], rest[1][node[1]]) >= best:
                continue
            if node[0] == ends[0] or node[1] == ends[1]:
                best, last = now + max(rest[0][node[0]], rest[1][node[1]]), node
                continue
            for (i, j), took in _next_nodes(lines, node):
                known = layers[i + j].get((i, j))
                if known is None or now + took < known[0]:
                    layers[i + j][i, j] = now + took, node
    if last is None:
        return None
    path: list[Node] = []
    at: Node | None = last
    while at is not None:
        path.append(at)
        at = layers[at[0] + at[1]][at][1]
    path.reverse()
    return TwoLines(makespan=best, order=_order(lines, path, layers))


def _rest(line: Line) -> list[float]:
    """Seconds of the steps from each position on, without weight gradients."""
    rest = [0.0]
    for seconds in reversed(line.seconds):
        rest.append(rest[-1] + seconds)
    return rest[::-1]


def _next_nodes(lines: tuple[Line, Line], node: Node) -> list[tuple[Node, float]]:
    """The nodes that follow a node, with the seconds to each; for a node at neither end."""
    a, b = lines
    i, j = node
    if a.comm[i] is b.comm[j]:
        return [((i + 1, j), a.seconds[i]), ((i, j + 1), b.seconds[j])]
    end_a, end_b = a.seconds[i], b.seconds[j]
    while True:
        if end_a == end_b:
            return [((i + 1, j + 1), end_a)]
        if end_a < end_b:
            i += 1
            if i == len(a.ids):
                return [((i, j + 1), end_b)]
            if a.comm[i] is b.comm[j]:
                return [((i, j + 1), end_b), ((i + 1, j), end_a + a.seconds[i])]
            end_a += a.seconds[i]
        else:
            j += 1
            if j == len(b.ids):
                return [((i + 1, j), end_a)]
            if a.comm[i] is b.comm[j]:
                return [((i + 1, j), end_a), ((i, j + 1), end_b + b.seconds[j])]
            end_b += b.seconds[j]


def _order(
    lines: tuple[Line, Line], path: list[Node], layers: list[dict[Node, tuple[float, Node | None]]]
) -> tuple[tuple[int, int], ...]:
    """The steps in order of start. Between two nodes a line runs without waiting from the moment of the first."""
    starts: list[tuple[float, float, int, int]] = []
    ends = (len(lines[0].ids), len(lines[1].ids))
    for node, following in zip(path, [*path[1:], ends], strict=True):
        for number, line in enumerate(lines):
            now = layers[node[0] + node[1]][node][0]
            for position in range(node[number], following[number]):
                starts.append((now, now + line.seconds[position], number, position))
                now += line.seconds[position]
    return tuple((number, position) for _, _, number, position in sorted(starts))
