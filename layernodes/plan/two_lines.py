"""The best order of two lines of steps on two streams, exactly, with weight gradients taken as a filling.

Without weight gradients this is the job shop of two jobs and two machines, solved by Akers' geometric method (S. B.
Akers, "A graphical approach to production scheduling problems", Operations Research 4, 1956): a shortest path over
positions along the two lines::

    node (i, j)    both lines stand at a boundary: i steps of the one and j of the other are over
    from a node    let both run side by side, until
                     both are at a boundary again: the next node
                     one of them wants a stream on which a step s of the other runs or starts: either it waits until
                     s is over, or the other waits with s until the wanted step is over; two next nodes
                     one of them is at its end: the other runs to its own end

Weight gradients are taken as work that may be cut at will: it appears when its ``B`` ends, and fills every moment in
which the compute stream has no step of a line. A label of a node is (time, work waiting); a label is dropped if another
one of the node is no later and has idled no more.

Why the result is a lower bound, and for lines without weight gradients exact:

* Take any schedule, and the order in which it runs the lines' steps on each stream. Start each of them as early as that
  order allows, moving steps forward into holes where they fit; none starts later than before. Between two conflicts
  both lines then run without waiting, as the rule does; at a conflict one step goes first, and in either case the other
  line waits at a boundary until that step is over, when both are at a boundary. So this is a path.
* Look at the last idle moment of the compute stream on that path. All work done after it is steps that start later, and
  weight gradients that appear later; in the schedule they start and appear no earlier. So the schedule does not end
  its computation earlier than the path.
* What follows a node depends on its label alone, is shifted by its time, and ends no later for less idling.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import final

from layernodes.plan.problem import NO_CLASS, Line, WgradClass

Node = tuple[int, int]


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class TwoLines:
    """The best order of two lines.

    Attributes:
        makespan: its makespan, with weight gradients as a filling.
        order: the lines' steps as (line, position along the line), in order of start.
    """

    makespan: float
    order: tuple[tuple[int, int], ...]


@final
@dataclass(frozen=True, slots=True)
class _Label:
    time: float
    waiting: float
    node: Node
    before: _Label | None


def solve_two_lines(
    first: Line,
    second: Line,
    classes: Sequence[WgradClass] = (),
    *,
    below: float = float("inf"),
    max_labels: int | None = None,
    stop: Callable[[], bool] = lambda: False,
) -> TwoLines | float | None:
    """The best order of two lines.

    Args:
        first, second: the lines.
        classes: the classes of weight gradients; those on the communication stream are left aside.
        below: only orders with a smaller makespan are of interest; a good value saves most of the work.
        max_labels: give up after this many labels.
        stop: asked once a diagonal (i + j) whether to give up.

    Returns:
        The best order; None if no order has a makespan below the given one. When it gives up: the smallest bound of
        the labels that are left, which no order beats.
    """
    return _TwoLines((first, second), classes, below).solve(max_labels, stop)


class _TwoLines:
    def __init__(self, lines: tuple[Line, Line], classes: Sequence[WgradClass], below: float) -> None:
        self.lines = lines
        self.wgrad = [
            [0.0 if kind == NO_CLASS or classes[kind].comm else classes[kind].seconds for kind in line.wgrad]
            for line in lines
        ]
        self.rest = [_sums_from(line.seconds) for line in lines]
        self.compute_rest = [
            _sums_from(
                [
                    wgrad + (0.0 if comm else seconds)
                    for seconds, comm, wgrad in zip(line.seconds, line.comm, own, strict=True)
                ]
            )
            for line, own in zip(lines, self.wgrad, strict=True)
        ]
        self.comm_rest = [
            _sums_from([seconds if comm else 0.0 for seconds, comm in zip(line.seconds, line.comm, strict=True)])
            for line in lines
        ]
        self.ends = (len(lines[0].ids), len(lines[1].ids))
        self.best = below
        self.last: _Label | None = None

    def solve(self, max_labels: int | None, stop: Callable[[], bool]) -> TwoLines | float | None:
        diagonals: list[dict[Node, list[_Label]]] = [{} for _ in range(sum(self.ends) + 1)]
        diagonals[0][0, 0] = [_Label(0.0, 0.0, (0, 0), None)]
        num_labels = 0
        for number, diagonal in enumerate(diagonals):
            if (max_labels is not None and num_labels > max_labels) or stop():
                waiting = [label for rest in diagonals[number:] for labels in rest.values() for label in labels]
                return min([self.best, *(self.bound(label) for label in waiting)])
            for labels in diagonal.values():
                for label in labels:
                    if self.bound(label) >= self.best:
                        continue
                    if label.node[0] == self.ends[0] or label.node[1] == self.ends[1]:
                        self.finish(label)
                        continue
                    for until in self.next_nodes(label.node):
                        after = self.advance(label, until)
                        if self.bound(after) < self.best:
                            num_labels += 1
                            self.add(diagonals[sum(after.node)], after)
            diagonal.clear()
        if self.last is None:
            return None
        return TwoLines(makespan=self.best, order=self.order(self.last))

    def bound(self, label: _Label) -> float:
        """A makespan that nothing that follows a label beats."""
        i, j = label.node
        return label.time + max(
            self.rest[0][i],
            self.rest[1][j],
            self.compute_rest[0][i] + self.compute_rest[1][j] + label.waiting,
            self.comm_rest[0][i] + self.comm_rest[1][j],
        )

    def finish(self, label: _Label) -> None:
        """Run the line that is left to its end."""
        end = self.advance(label, (self.ends, max(self.rest[0][label.node[0]], self.rest[1][label.node[1]])))
        if end.time + end.waiting < self.best:
            self.best, self.last = end.time + end.waiting, label

    def next_nodes(self, node: Node) -> list[tuple[Node, float]]:
        """The nodes that follow a node at neither end, with the seconds to each."""
        a, b = self.lines
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

    def advance(self, label: _Label, until: tuple[Node, float]) -> _Label:
        """The label at the next node: both lines run without waiting, weight gradients fill the gaps."""
        node, took = until
        if not label.waiting and not (any(self.wgrad[0]) or any(self.wgrad[1])):
            return _Label(label.time + took, 0.0, node, label)
        # (moment, work that computes from then on, work that appears then), in order of moments
        events: list[tuple[float, float, float]] = []
        for line, wgrad, start, end in zip(self.lines, self.wgrad, label.node, node, strict=True):
            now = 0.0
            for position in range(start, end):
                if not line.comm[position]:
                    events.append((now, line.seconds[position], 0.0))
                now += line.seconds[position]
                if wgrad[position]:
                    events.append((now, 0.0, wgrad[position]))
        events.sort()
        waiting, free = label.waiting, 0.0
        for moment, computes, appears in events:
            if moment > free:
                waiting = max(0.0, waiting - (moment - free))
                free = moment
            free += computes
            waiting += appears
        if took > free:
            waiting = max(0.0, waiting - (took - free))
        return _Label(label.time + took, waiting, node, label)

    def add(self, diagonal: dict[Node, list[_Label]], label: _Label) -> None:
        """Add a label to those of its node, unless one is as good; drop those that it makes useless.

        At one node, time plus waiting work is the idle time so far plus a constant.
        """
        labels = diagonal.setdefault(label.node, [])
        idle = label.time + label.waiting
        for other in labels:
            if other.time <= label.time and other.time + other.waiting <= idle:
                return
        labels[:] = [o for o in labels if o.time < label.time or o.time + o.waiting < idle]
        labels.append(label)

    def order(self, last: _Label) -> tuple[tuple[int, int], ...]:
        """The steps in order of start. Between two nodes a line runs without waiting from the moment of the first."""
        path: list[_Label] = []
        at: _Label | None = last
        while at is not None:
            path.append(at)
            at = at.before
        path.reverse()
        starts: list[tuple[float, float, int, int]] = []
        for label, following in zip(path, [*(p.node for p in path[1:]), self.ends], strict=True):
            for number, line in enumerate(self.lines):
                now = label.time
                for position in range(label.node[number], following[number]):
                    starts.append((now, now + line.seconds[position], number, position))
                    now += line.seconds[position]
        return tuple((number, position) for _, _, number, position in sorted(starts))


def _sums_from(values: Sequence[float]) -> list[float]:
    """The sum of the values from each position on."""
    sums = [0.0]
    for value in reversed(values):
        sums.append(sums[-1] + value)
    return sums[::-1]
