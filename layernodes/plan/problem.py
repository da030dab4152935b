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

from layernodes.plan.costs import FREE, CostModel, SlotCost
from layernodes.plan.rules import NONE, Mode, Rules
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
        acquires, releases: bytes; none where all go forward alone.
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
        alike: whether all lines take the same seconds, streams and bytes, step by step.
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


def build_problem(rules: Rules, costs: CostModel, *, factors: tuple[float, float] = (1.0, 1.0)) -> Problem:
    """Read lines and classes off rules and costs.

    Args:
        rules: the rules.
        costs: the costs.
        factors: multiply the seconds of computation, and of communication.

    Raises:
        CostError: a slot has no cost.
    """
    reading = _Reading(rules, costs, factors)
    lines = tuple(reading.line(ids) for ids in reading.chains())
    return Problem(
        rules=rules,
        lines=lines,
        classes=tuple(reading.classes),
        wgrad_ids=reading.wgrad_ids,
        alike=len({(line.seconds, line.comm, line.wgrad, line.acquires, line.releases) for line in lines}) <= 1,
        held=reading.held(),
        compute_total=reading.total(StreamType.COMPUTE),
        comm_total=reading.total(StreamType.COMM),
    )


class _Reading:
    """Rules and costs, read step by step; ``classes`` grows with the lines."""

    def __init__(self, rules: Rules, costs: CostModel, factors: tuple[float, float]) -> None:
        self.rules = rules
        self.tables = {phase: {} if shape is None else costs.table(shape) for phase, shape in rules.shapes.items()}
        self.factors = factors
        self.retains = rules.mode is not Mode.FORWARD
        self.required = list(rules.required())
        self.wgrad_ids = {b: w for b, w in enumerate(rules.wgrad_of) if w != NONE}
        self.classes: dict[WgradClass, int] = {}

    def chains(self) -> Iterable[Sequence[int]]:
        """The forward and backward steps of each microbatch, in order."""
        nearest = self.rules.nearest(self.required)
        members: dict[int, list[int]] = {}
        for number in self.required:
            step = self.rules.steps[number]
            if step.phase is not Phase.W:
                line = members.setdefault(step.microbatch, [])
                assert nearest[number] == (line[-1] if line else NONE)
                line.append(number)
        return members.values()

    def line(self, ids: Sequence[int]) -> Line:
        steps = [self.rules.steps[number] for number in ids]
        cost = [self.cost(step) if self.retains else FREE for step in steps]
        seconds = [self.seconds(number) for number in ids]
        comm = [self.is_comm(number) for number in ids]
        tail, to_compute, to_comm = [0.0], [float("inf")], [float("inf")]
        for index in reversed(range(len(ids))):
            wgrad = self.wgrad_ids.get(ids[index])
            tail.append(seconds[index] + max(tail[-1], 0.0 if wgrad is None else self.seconds(wgrad)))
            to_compute.append(seconds[index] + to_compute[-1] if comm[index] else 0.0)
            to_comm.append(0.0 if comm[index] else seconds[index] + to_comm[-1])
        return Line(
            ids=tuple(ids),
            seconds=tuple(seconds),
            comm=tuple(comm),
            wgrad=tuple(self.wgrad_class(number) for number in ids),
            acquires=tuple(
                c.acquires(s.phase, deferred=n in self.wgrad_ids) for c, s, n in zip(cost, steps, ids, strict=True)
            ),
            releases=tuple(c.releases(s.phase) for c, s in zip(cost, steps, strict=True)),
            tail=tuple(reversed(tail)),
            to_compute=tuple(reversed(to_compute)),
            to_comm=tuple(reversed(to_comm)),
        )

    def wgrad_class(self, number: int) -> int:
        """The class of the ``W`` that a step makes available, or ``NO_CLASS``."""
        wgrad = self.wgrad_ids.get(number)
        if wgrad is None:
            return NO_CLASS
        found = WgradClass(
            seconds=self.seconds(wgrad),
            comm=self.is_comm(wgrad),
            releases=self.cost(self.rules.steps[wgrad]).releases(Phase.W),
        )
        return self.classes.setdefault(found, len(self.classes))

    def held(self) -> int:
        """Bytes of the activations of forward steps that are no part of this, as of a pair's backward chunk."""
        steps = self.rules.steps
        forwards = {(s.microbatch, s.layer, s.slot) for s in steps if s.phase is Phase.F}
        return sum(
            self.cost(s).activation_bytes
            for s in (steps[n] for n in self.required)
            if s.phase is Phase.B and (s.microbatch, s.layer, s.slot) not in forwards
        )

    def total(self, stream: StreamType) -> float:
        """Seconds of all steps of a stream."""
        return sum(self.seconds(number) for number in self.required if self.rules.streams[number] is stream)

    def seconds(self, number: int) -> float:
        step = self.rules.steps[number]
        factor = self.factors[self.is_comm(number)]
        return factor * self.cost(step).seconds(step.phase, deferred=number in self.wgrad_ids)

    def is_comm(self, number: int) -> bool:
        return self.rules.streams[number] is StreamType.COMM

    def cost(self, step: Step) -> SlotCost:
        return self.tables[step.phase][step.layer, step.slot]
