"""The one statement of what must have run before a step.

Validator, simulator, runner, renderer and optimizer all ask here.

For one microbatch the forward and backward steps form one line, and each deferred weight gradient hangs off its B::

    F(first slot) -> ... -> F(last slot) -> B(last slot) -> ... -> B(first slot)
                                                |                      |
                                            W(last slot)           W(first slot)      only where the slot defers

Slots go through pre_process, the layers in order, and post_process. A step must come after the nearest step before
it on that line *that the schedule has*: pass-throughs may be left out. Microbatches are independent, but for one
thing: the stores of deferred weight gradients are queues, so a module's Ws run in the order of its Bs.

Contract: ``Rules`` numbers all steps that may occur with ids 0, 1, ... so that ``before[id] < id``; everything here
is linear in the number of steps::

    nearest(id)      = before(id) if present, else nearest(before(id))
    predecessors(id) = nearest(id), and for a W the W of the B that ran before its own B on the same module
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import StrEnum
from typing import Self, final

from layernodes.errors import ScheduleError
from layernodes.plan.arguments import check_argument
from layernodes.plan.shape import ChunkShape, check_shapes
from layernodes.plan.step import Step
from layernodes.slots import Phase, StreamType

NONE = -1
"""Stands for "no step" among ids."""


class Mode(StrEnum):
    """What a schedule is for."""

    TRAIN = "train"
    FORWARD = "forward"
    PAIR = "pair"


@final
class Rules:
    """All steps that a schedule may have, with what each must come after.

    Build one with ``Rules.of`` or ``Rules.of_pair``; it never changes and serves any number of schedules.

    Attributes:
        mode: training, forward only, or a pair.
        shapes: for each phase, the shape of its chunk, or None where there are no steps of that phase.
        microbatches: for each phase, the microbatches that have steps of it.
        steps: step of each id.
        ids: id of each step.
        optional: for each id, whether the step is a pass-through that may be left out.
        streams: for each id, the stream of its slot.
        before: for each id, the id that comes directly before it (always smaller), or ``NONE``.
        wgrad_of: for each id of a B whose weight gradients are deferred, the id of its W; else ``NONE``.
    """

    def __init__(
        self, mode: Mode, shapes: Mapping[Phase, ChunkShape | None], microbatches: Mapping[Phase, range]
    ) -> None:
        self.mode = mode
        self.shapes = shapes
        self.microbatches = microbatches
        steps: list[Step] = []
        optional: list[bool] = []
        streams: list[StreamType] = []
        before: list[int] = []
        wgrad_of: dict[int, int] = {}

        def add(step: Step, *, after: int, stream: StreamType, passthrough: bool) -> int:
            steps.append(step)
            before.append(after)
            streams.append(stream)
            optional.append(passthrough)
            return len(steps) - 1

        places = {phase: [] if shape is None else list(shape.places()) for phase, shape in shapes.items()}
        for microbatch in sorted({*microbatches[Phase.F], *microbatches[Phase.B]}):
            last = NONE
            deferred: list[int] = []
            for phase, line in ((Phase.F, places[Phase.F]), (Phase.B, places[Phase.B][::-1])):
                for layer, slot in line if microbatch in microbatches[phase] else ():
                    step = Step(phase, microbatch, layer, slot.name)
                    last = add(step, after=last, stream=slot.stream, passthrough=slot.passthrough)
                    if phase is Phase.B and slot.wgrad:
                        deferred.append(last)
            for b in deferred:
                step = Step(Phase.W, microbatch, steps[b].layer, steps[b].slot)
                wgrad_of[b] = add(step, after=b, stream=streams[b], passthrough=False)
        self.steps: tuple[Step, ...] = tuple(steps)
        self.ids: Mapping[Step, int] = {step: number for number, step in enumerate(steps)}
        self.optional: tuple[bool, ...] = tuple(optional)
        self.streams: tuple[StreamType, ...] = tuple(streams)
        self.before: tuple[int, ...] = tuple(before)
        self.wgrad_of: tuple[int, ...] = tuple(wgrad_of.get(number, NONE) for number in range(len(steps)))

    @classmethod
    def of(cls, shape: ChunkShape, num_microbatches: int, mode: Mode | str = Mode.TRAIN) -> Self:
        """The rules for schedules of one chunk.

        Args:
            shape: the chunk's shape.
            num_microbatches: microbatches are numbered 0 to num_microbatches - 1.
            mode: ``"train"``: forward, backward and deferred weight gradients; ``"forward"``: forward alone.

        Raises:
            ScheduleError: a negative number, or another mode.
        """
        check_argument("shape", shape, ChunkShape)
        check_argument("num_microbatches", num_microbatches, int)
        if num_microbatches < 0:
            raise ScheduleError(f"num_microbatches={num_microbatches}; give 0 or more")
        if mode not in (Mode.TRAIN, Mode.FORWARD):
            raise ScheduleError(f"unknown mode {mode!r}; choose 'train' or 'forward', or use validate_pair for pairs")
        backward = shape if mode == Mode.TRAIN else None
        both = range(num_microbatches)
        return cls(
            Mode(mode),
            {Phase.F: shape, Phase.B: backward, Phase.W: backward},
            {Phase.F: both, Phase.B: both if backward else range(0), Phase.W: both if backward else range(0)},
        )

    @classmethod
    def of_pair(cls, forward_shape: ChunkShape | None, backward_shape: ChunkShape | None) -> Self:
        """The rules for pairs: ``F0`` of one chunk, ``B1`` and ``W1`` of another; either may be None."""
        check_shapes(forward_shape=forward_shape, backward_shape=backward_shape)
        backward = range(1, 2) if backward_shape else range(0)
        return cls(
            Mode.PAIR,
            {Phase.F: forward_shape, Phase.B: backward_shape, Phase.W: backward_shape},
            {Phase.F: range(1) if forward_shape else range(0), Phase.B: backward, Phase.W: backward},
        )

    def required(self) -> Iterator[int]:
        """Ids of the steps that every valid schedule has: all but the pass-throughs."""
        return (number for number, optional in enumerate(self.optional) if not optional)

    def nearest(self, order: Iterable[int]) -> list[int]:
        """For every id, the nearest id before it that is among the given ones, or ``NONE``."""
        present = bytearray(len(self.steps))
        for number in order:
            present[number] = 1
        nearest: list[int] = []
        for before in self.before:
            nearest.append(before if before == NONE or present[before] else nearest[before])
        return nearest

    def predecessors(self, order: Sequence[int]) -> list[tuple[int, ...]]:
        """What each step must come after, directly; what follows from that by further steps is left out.

        Args:
            order: ids in the order of a schedule, each at most once. The order itself decides only one thing: the
                order of a module's Bs, which is that of its Ws.

        Returns:
            For each position in ``order``, none, one or two ids of steps in ``order``.
        """
        nearest = self.nearest(order)
        present = set(order)
        previous_wgrad: dict[int, int] = {}
        newest: dict[tuple[int | None, str], int] = {}
        for number in order:
            wgrad = self.wgrad_of[number]
            if wgrad in present:
                module = self.steps[wgrad].layer, self.steps[wgrad].slot
                previous_wgrad[wgrad] = newest.get(module, NONE)
                newest[module] = wgrad
        return [
            tuple(before for before in (nearest[number], previous_wgrad.get(number, NONE)) if before != NONE)
            for number in order
        ]

    def dependencies(self, steps: Iterable[Step]) -> tuple[tuple[int, ...], ...]:
        """For each step of a *valid* schedule, the positions of the steps that must be done before it starts.

        Raises:
            KeyError: a step is foreign; ``validate`` first.
        """
        order = [self.ids[step] for step in steps]
        position = {number: index for index, number in enumerate(order)}
        return tuple(tuple(position[number] for number in before) for before in self.predecessors(order))
