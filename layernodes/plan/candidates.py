"""Ready-made schedules to start an optimization from, by name; some are the same steps under several names."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Final, NamedTuple

from layernodes.plan import pairs, schedules
from layernodes.plan.generators import EARLY_RELEASE_ORDER, MEGATRON_ORDER, backward_steps, forward_steps
from layernodes.plan.schedule import PairSchedule, Schedule
from layernodes.plan.shape import ChunkShape
from layernodes.plan.step import Step
from layernodes.plan.wgrad import WgradPlace, place_wgrad
from layernodes.slots import Phase

_ORDERS = {"combined_1f1b": MEGATRON_ORDER, "combined_1f1b early_release": EARLY_RELEASE_ORDER}


NUM_WELL_KNOWN: Final = 6
"""How many of the built-in candidates, which come first, an optimization always judges.

Serial, Megatron-Core's two orders with ``W`` after ``B`` and in Megatron-Core's place, and groups of two; of forwards
alone the smallest groups; of pairs the backward before the forward.
"""
_FEW: Final = 8


class Candidate(NamedTuple):
    """A schedule's steps, with a name for people."""

    name: str
    steps: Sequence[Step]


def built_in_candidates(shape: ChunkShape, num_microbatches: int, *, trains: bool) -> Iterator[Candidate]:
    """The built-in schedules of a chunk, those that users know first; each is made when it is asked for."""
    if not trains:
        for group in (1, *group_sizes(num_microbatches)):
            yield Candidate(
                f"forward_only group={group}", schedules.forward_only(shape, num_microbatches, group=group).steps
            )
        return
    plain: list[Candidate] = []
    for candidate in _plain_candidates(shape, num_microbatches):
        plain.append(candidate)
        yield candidate
    for name, steps in plain:
        yield from with_wgrad(name, steps, shape, shape)


def group_sizes(num_microbatches: int) -> Sequence[int]:
    """How many microbatches go together, smallest first: any number of up to 8, else 3, powers of two, and all."""
    if num_microbatches <= _FEW:
        return range(2, num_microbatches + 1)
    powers = {1 << power for power in range(1, num_microbatches.bit_length())}
    return sorted({3, num_microbatches, *powers})


def _plain_candidates(shape: ChunkShape, num_microbatches: int) -> Iterator[Candidate]:
    yield Candidate("serial", schedules.serial(shape, num_microbatches).steps)
    for megatron_wgrad in (False, True):
        for name, order in _ORDERS.items():
            built = schedules.combined_1f1b(shape, num_microbatches, order=order, megatron_wgrad=megatron_wgrad)
            yield Candidate(name + megatron_wgrad * " megatron_wgrad", built.steps)
    for group in group_sizes(num_microbatches):
        steps = schedules.forward_forward(shape, num_microbatches, group=group).steps
        yield Candidate(f"forward_forward group={group}", steps)


def built_in_pair_candidates(
    forward_shape: ChunkShape | None, backward_shape: ChunkShape | None
) -> Iterator[Candidate]:
    """The built-in pairs, and the backward before the forward, which holds the fewest activations."""
    plain = [("serial", pairs.serial(forward_shape, backward_shape).steps)]
    for megatron_wgrad in (False, True):
        for name, order in _ORDERS.items():
            pair = pairs.combined_1f1b(forward_shape, backward_shape, order=order, megatron_wgrad=megatron_wgrad)
            plain.append((name + megatron_wgrad * " megatron_wgrad", pair.steps))
    backward = () if backward_shape is None else backward_steps(backward_shape, 1)
    forward = () if forward_shape is None else forward_steps(forward_shape, 0)
    plain.append(("backward first", (*backward, *forward)))
    for name, steps in plain:
        yield Candidate(name, steps)
    for name, steps in plain:
        yield from with_wgrad(name, steps, forward_shape, backward_shape)


def repeated_turn(shape: ChunkShape, num_microbatches: int, turn: PairSchedule) -> Candidate:
    """A pair repeated: each microbatch's forward beside the backward of the one before it."""
    last = num_microbatches - 1
    steps = chain(
        forward_steps(shape, 0),
        (
            Step(step.phase, m + 1 if step.phase is Phase.F else m, step.layer, step.slot)
            for m in range(last)
            for step in turn
        ),
        backward_steps(shape, last),
    )
    return Candidate("the best pair, repeated", tuple(steps))


def repeated_turn_between_pairs(
    shape: ChunkShape, num_microbatches: int, turn: PairSchedule, start: Schedule
) -> Iterator[Candidate]:
    """The same with two microbatches ahead: the first two forwards run together, and the last two backwards.

    Args:
        shape: the chunk's shape.
        num_microbatches: at least 2.
        turn: the pair.
        start: the forwards of microbatches 0 and 1.
    """
    last = num_microbatches - 2
    turns = [
        Step(step.phase, m + 2 if step.phase is Phase.F else m, step.layer, step.slot)
        for m in range(last)
        for step in turn
    ]
    ending = [step for step in schedules.forward_forward(shape, 2) if step.phase is not Phase.F]
    for place in (WgradPlace.AFTER_B, WgradPlace.NEXT_COMM):
        placed = Schedule(place_wgrad(ending, forward_shape=shape, backward_shape=shape, place=place)).shift(last)
        yield Candidate(f"the best pair, repeated two ahead, last W {place}", (*start, *turns, *placed))


def repeated_group(shape: ChunkShape, num_microbatches: int, group: Schedule) -> Candidate:
    """A schedule of two microbatches repeated; an odd last microbatch runs alone."""
    groups = (group.shift(first) for first in range(0, num_microbatches - 1, 2))
    last = schedules.serial(shape, 1).shift(num_microbatches - 1) if num_microbatches % 2 else Schedule()
    return Candidate("the best group of two, repeated", tuple(chain(*groups, last)))


def with_wgrad(
    name: str, steps: Sequence[Step], forward_shape: ChunkShape | None, backward_shape: ChunkShape | None
) -> Iterator[Candidate]:
    if backward_shape is None or not any(backward_shape.wgrad_slots):
        return
    for place in WgradPlace:
        placed = place_wgrad(steps, forward_shape=forward_shape, backward_shape=backward_shape, place=place)
        yield Candidate(f"{name}, W {place}", tuple(placed))
