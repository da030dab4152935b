"""What there is to order: the lines of steps of a chunk or pair, with their seconds and bytes, as plain numbers.

A *line* is the chain of one microbatch's forward and backward steps, each after the one before it; a deferred ``W``
becomes available when its ``B`` has been launched. Both are read off the ``Rules``. Since a ``W`` runs on the stream of
its ``B``, launching it later than that is all that the rules ask for. ``W``s of equal seconds, bytes and stream form a
*class*: whichever of them is available may run in place of another, so orders differ only by which class runs when,
and the one whose ``B`` was launched first goes first, which also keeps each module's ``W``s in the order of its ``B``s.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, final

from layernodes.plan.costs import CostModel
from layernodes.plan.rules import NONE, Rules
from layernodes.plan.step import Step
from layernodes.slots import Phase, StreamType

NO_CLASS: Final = -1


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """The steps of one microbatch, in order; everything below is by position along the line.

    Attributes:
        ids: ids of the steps in the rules.
        seconds: how long each takes.
        comm: whether it is on the communication stream.
        wgrad: class of the ``W`` that it makes available, or ``NO_CLASS``.
        acquires, releases: bytes.
        tail: seconds of the longest chain from the start of each step on; one more entry, 0, for the end.
        to_compute, to_comm: seconds along the line before the next step on that stream starts; infinite for none.
    """

    ids: tuple[int, ...]
    seconds: tuple[float, ...]
    comm: tuple[bool, ...]
    wgrad: tuple[int, ...]
    acquires: tuple[int, ...]
    releases: tuple[int, ...]
    tail: tuple[float, ...]
    to_compute: tuple[float, ...]
    to_comm: tuple[float, ...]


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class WgradClass:
    """``W`` steps that may stand for one another."""

    seconds: float
    comm: bool
    releases: int


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """Lines and classes of weight gradients.

    Attributes:
        rules: the rules that it was read off.
        lines: the lines.
        classes: the classes of ``W`` steps.
        wgrad_ids: for each ``B`` that defers, its ``W``.
        alike: whether all lines have the same costs, step by step.
        held: bytes held before the first step (activations of a pair's backward chunk).
        compute_total, comm_total: seconds of all steps of each stream.
    """

    rules: Rules
    lines: tuple[Line, ...]
    classes: tuple[WgradClass, ...]
    wgrad_ids: dict[int, int]
    alike: bool
    held: int
    compute_total: float
    comm_total: float

    @property
    def num_steps(self) -> int:
        """Steps of every schedule of this problem: pass-throughs are left out."""
        return sum(len(line.ids) for line in self.lines) + len(self.wgrad_ids)

    def steps(self, order: Iterable[int]) -> tuple[Step, ...]:
        """The steps of these ids."""
        return tuple(self.rules.steps[number] for number in order)


def build_problem(rules: Rules, costs: CostModel, *, compute_factor: float = 1.0) -> Problem:
    """Read lines and classes off rules and costs.

    Args:
        rules: the rules.
        costs: the costs.
        compute_factor: multiplies the seconds of computation.

    Raises:
        CostError: a slot has no cost.
    """
    tables = {phase: {} if shape is None else costs.table(shape) for phase, shape in rules.shapes.items()}
    required = list(rules.required())
    nearest = rules.nearest(required)
    wgrad_ids = {b: w for b, w in enumerate(rules.wgrad_of) if w != NONE}
    classes: dict[WgradClass, int] = {}
    members: dict[int, list[int]] = {}
    for number in required:
        step = rules.steps[number]
        if step.phase is not Phase.W:
            line = members.setdefault(step.microbatch, [])
            assert nearest[number] == (line[-1] if line else NONE)
            line.append(number)

    def seconds_of(number: int) -> float:
        step = rules.steps[number]
        cost = tables[step.phase][step.layer, step.slot]
        factor = 1.0 if rules.streams[number] is StreamType.COMM else compute_factor
        return factor * cost.seconds(step.phase, deferred=number in wgrad_ids)

    def class_of(number: int) -> int:
        if number not in wgrad_ids:
            return NO_CLASS
        wgrad = wgrad_ids[number]
        step = rules.steps[wgrad]
        found = WgradClass(
            seconds=seconds_of(wgrad),
            comm=rules.streams[wgrad] is StreamType.COMM,
            releases=tables[Phase.W][step.layer, step.slot].releases(Phase.W),
        )
        return classes.setdefault(found, len(classes))

    def build_line(ids: Sequence[int]) -> Line:
        steps = [rules.steps[number] for number in ids]
        cost = [tables[step.phase][step.layer, step.slot] for step in steps]
        seconds = [seconds_of(number) for number in ids]
        comm = [rules.streams[number] is StreamType.COMM for number in ids]
        tail, to_compute, to_comm = [0.0], [float("inf")], [float("inf")]
        for index in reversed(range(len(ids))):
            wgrad = wgrad_ids.get(ids[index])
            tail.append(seconds[index] + max(tail[-1], 0.0 if wgrad is None else seconds_of(wgrad)))
            to_compute.append(seconds[index] + to_compute[-1] if comm[index] else 0.0)
            to_comm.append(0.0 if comm[index] else seconds[index] + to_comm[-1])
        return Line(
            ids=tuple(ids),
            seconds=tuple(seconds),
            comm=tuple(comm),
            wgrad=tuple(class_of(number) for number in ids),
            acquires=tuple(
                c.acquires(s.phase, deferred=n in wgrad_ids) for c, s, n in zip(cost, steps, ids, strict=True)
            ),
            releases=tuple(c.releases(s.phase) for c, s in zip(cost, steps, strict=True)),
            tail=tuple(reversed(tail)),
            to_compute=tuple(reversed(to_compute)),
            to_comm=tuple(reversed(to_comm)),
        )

    lines = tuple(build_line(ids) for ids in members.values())
    totals = {stream: sum(seconds_of(n) for n in required if rules.streams[n] is stream) for stream in StreamType}
    forwards = {(s.microbatch, s.layer, s.slot) for s in rules.steps if s.phase is Phase.F}
    held = sum(
        tables[Phase.B][s.layer, s.slot].activation_bytes
        for s in (rules.steps[n] for n in required)
        if s.phase is Phase.B and (s.microbatch, s.layer, s.slot) not in forwards
    )
    return Problem(
        rules=rules,
        lines=lines,
        classes=tuple(classes),
        wgrad_ids=wgrad_ids,
        alike=all(
            (line.seconds, line.comm, line.wgrad) == (lines[0].seconds, lines[0].comm, lines[0].wgrad) for line in lines
        ),
        held=held,
        compute_total=totals[StreamType.COMPUTE],
        comm_total=totals[StreamType.COMM],
    )
