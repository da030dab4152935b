"""A schedule compiled for one chunk: what each step runs, on which lane, and what it waits for.

Contract: a lane is a stream's steps in schedule order (a FIFO). A step waits for the steps of the *other* lane that
must be
done before it; of those, only the latest matters, since lanes are FIFO::

    must be done before a step:    its predecessors in the rules
                                   the step before it that touches random generators, if it does too
                                   the step before it that shares parameters with it across lanes

A program depends on the schedule and the shape alone, so it is compiled once and reused by every run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, final

from layernodes.plan.rules import NONE, Rules
from layernodes.plan.step import Step
from layernodes.slots import Phase, StreamType

if TYPE_CHECKING:
    from layernodes.plan.chunk_plan import ChunkPlan

LANES: Final = (StreamType.COMPUTE, StreamType.COMM)
"""The streams, by lane number."""


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Op:
    """One step of a program.

    Attributes:
        step, text: the step and its text.
        position: its position in the schedule.
        run: which of the program's chunk runs it works on.
        place: index of its slot among the chunk's places.
        lane: number of its stream in ``LANES``.
        index: its index within its lane.
        waits_for: index, within the other lane, of the last step that must be done before it; ``NONE`` for none.
        is_awaited: whether a step of the other lane waits for this one or a later one before the next awaited.
        communicates: whether it may issue collectives.
        ends_forward, begins_backward, ends_backward: first or last step of a microbatch's pass.
    """

    step: Step
    text: str
    position: int
    run: int
    place: int
    lane: int
    index: int
    waits_for: int
    is_awaited: bool
    communicates: bool
    ends_forward: bool
    begins_backward: bool
    ends_backward: bool


@final
@dataclass(frozen=True, slots=True)
class Program:
    """The ops of a schedule, in its order, and by lane."""

    ops: tuple[Op, ...]
    lanes: tuple[tuple[Op, ...], tuple[Op, ...]]


def compile_steps(steps: Sequence[Step], rules: Rules, chunks: Sequence[ChunkPlan | None]) -> Program:
    """Compile valid steps.

    Args:
        steps: the steps, valid under ``rules``.
        rules: the rules that they were checked against.
        chunks: the chunk of each microbatch; all the same, or the two of a pair.
    """
    places = [{} if chunk is None else {(p.layer, p.slot): i for i, p in enumerate(chunk.places)} for chunk in chunks]
    dependencies = rules.dependencies(steps)
    lane_of = [LANES.index(rules.streams[rules.ids[step]]) for step in steps]
    index_in_lane: list[int] = []
    counts = [0, 0]
    for lane in lane_of:
        index_in_lane.append(counts[lane])
        counts[lane] += 1
    first, last = _ends(steps)
    waits: list[int] = []
    latest_rng = NONE
    latest_sharer = [NONE, NONE]
    for position, step in enumerate(steps):
        chunk = chunks[step.microbatch]
        assert chunk is not None
        place = chunk.places[places[step.microbatch][step.layer, step.slot]]
        before = [*dependencies[position]]
        if place.node is not None and place.touches_rng and step.phase is not Phase.W:
            before.append(latest_rng)
            latest_rng = position
        if place.sites:
            before.append(latest_sharer[1 - lane_of[position]])
            latest_sharer[lane_of[position]] = position
        across = [index_in_lane[b] for b in before if b != NONE and lane_of[b] != lane_of[position]]
        waits.append(max(across, default=NONE))
    awaited = (
        {w for w, lane in zip(waits, lane_of, strict=True) if lane == 1},
        {w for w, lane in zip(waits, lane_of, strict=True) if lane == 0},
    )
    ops = tuple(
        Op(
            step=step,
            text=str(step),
            position=position,
            run=step.microbatch,
            place=places[step.microbatch][step.layer, step.slot],
            lane=lane_of[position],
            index=index_in_lane[position],
            waits_for=waits[position],
            is_awaited=index_in_lane[position] in awaited[lane_of[position]],
            communicates=_communicates(chunks[step.microbatch], step),
            ends_forward=step.phase is Phase.F and last[step.microbatch, Phase.F] == position,
            begins_backward=step.phase is Phase.B and first[step.microbatch, Phase.B] == position,
            ends_backward=step.phase is Phase.B and last[step.microbatch, Phase.B] == position,
        )
        for position, step in enumerate(steps)
    )
    return Program(ops, (tuple(op for op in ops if op.lane == 0), tuple(op for op in ops if op.lane == 1)))


def _communicates(chunk: ChunkPlan | None, step: Step) -> bool:
    return step.layer is not None or (chunk is not None and chunk.is_tensor_parallel)


def _ends(steps: Sequence[Step]) -> tuple[dict[tuple[int, Phase], int], dict[tuple[int, Phase], int]]:
    first: dict[tuple[int, Phase], int] = {}
    last: dict[tuple[int, Phase], int] = {}
    for position, step in enumerate(steps):
        first.setdefault((step.microbatch, step.phase), position)
        last[step.microbatch, step.phase] = position
    return first, last
