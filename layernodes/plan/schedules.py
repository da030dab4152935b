"""The built-in schedules of one chunk; ``pairs`` has the same ones for two chunks.

Each is valid for every shape and leaves pass-throughs out. Each is defined once, over *turns*: which microbatches go
forward and which backward at the same time. To write one's own, compose ``forward_steps``, ``backward_steps``,
``pair_steps`` and ``interleave`` in a ``Schedule``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Final

from layernodes.errors import ScheduleError
from layernodes.plan.arguments import check_argument
from layernodes.plan.generators import (
    EARLY_RELEASE_ORDER,
    MEGATRON_ORDER,
    backward_steps,
    forward_steps,
    interleave,
    pair_steps,
)
from layernodes.plan.schedule import Schedule
from layernodes.plan.shape import ChunkShape
from layernodes.plan.step import Step
from layernodes.plan.wgrad import WgradPlace, place_wgrad, warn_where_nothing_is_deferred


def serial(shape: ChunkShape, num_microbatches: int) -> Schedule:
    """Microbatch after microbatch, each forward and then backward: the plain model's order.

    Args:
        shape: the chunk's shape.
        num_microbatches: number of microbatches.

    Raises:
        ScheduleError: no microbatches.
    """
    check_argument("shape", shape, ChunkShape)
    return Schedule(chain.from_iterable(serial_turn(shape, shape, m, m) for m in _range(num_microbatches)))


def combined_1f1b(
    shape: ChunkShape,
    num_microbatches: int,
    *,
    early_release: bool = False,
    megatron_wgrad: bool = False,
    order: str | None = None,
) -> Schedule:
    """Each microbatch's forward beside the backward of the one before it, in Megatron-Core's order.

    Mirrors ``TransformerModelChunkSchedulePlan.run``; the first forward and the last backward run alone.

    Args:
        shape: the chunk's shape.
        num_microbatches: number of microbatches.
        early_release: attention goes backward before the other microbatch's experts go forward
            (``ep_overlap_early_attn_memory_release``).
        megatron_wgrad: put deferred weight gradients where Megatron-Core has them, not directly after their ``B``.
        order: the order of two layers, as in ``pair_steps``; given, it takes the place of ``early_release``.

    Raises:
        ScheduleError: no microbatches, or a malformed order.
    """
    check_argument("shape", shape, ChunkShape)
    turns = zip([*_range(num_microbatches), None], [None, *_range(num_microbatches)], strict=True)
    return Schedule(
        step
        for forward, backward in turns
        for step in combined_turn(
            None if forward is None else shape,
            None if backward is None else shape,
            forward or 0,
            backward or 0,
            order=order or (EARLY_RELEASE_ORDER if early_release else MEGATRON_ORDER),
            megatron_wgrad=megatron_wgrad,
        )
    )


def forward_forward(shape: ChunkShape, num_microbatches: int, *, group: int = 2) -> Schedule:
    """The forwards of a group of microbatches interleaved, then their backwards, then the next group.

    While one microbatch of the group communicates, the others compute.

    Args:
        shape: the chunk's shape.
        num_microbatches: number of microbatches; the last group is smaller where it does not divide.
        group: number of microbatches that go together.

    Raises:
        ScheduleError: no microbatches, or a group of less than one.
    """
    check_argument("shape", shape, ChunkShape)
    groups = _groups(num_microbatches, group)
    return Schedule(chain.from_iterable(interleaved_turn(shape, shape, members, members) for members in groups))


def forward_only(shape: ChunkShape, num_microbatches: int, *, group: int = 1) -> Schedule:
    """The forwards alone, in groups interleaved as in ``forward_forward``; for ``mode="forward"``.

    Args:
        shape, num_microbatches, group: as for ``forward_forward``.

    Raises:
        ScheduleError: as ``forward_forward``.
    """
    check_argument("shape", shape, ChunkShape)
    groups = _groups(num_microbatches, group)
    return Schedule(chain.from_iterable(interleaved_turn(shape, shape, members, ()) for members in groups))


def deferred(schedule: Schedule, shape: ChunkShape, place: WgradPlace | str = WgradPlace.NEXT_COMM) -> Schedule:
    """The same schedule with the weight gradients that the shape defers at a chosen place.

    Where the shape defers none (its chunk was built with ``wgrad="off"``, the default) the schedule has no ``W`` steps,
    and a warning is logged.

    Args:
        schedule: a valid schedule, with or without ``W`` steps; those it has are moved.
        shape: the chunk's shape; ``shape.wgrad_slots`` says what has a ``W``.
        place: ``"after_b"``, ``"next_comm"``, ``"end"`` or ``"first_layer_last"``; see ``WgradPlace``.

    Raises:
        ScheduleError: another place.
    """
    check_argument("schedule", schedule, Schedule)
    check_argument("shape", shape, ChunkShape)
    warn_where_nothing_is_deferred(schedule, shape)
    return Schedule(place_wgrad(schedule, forward_shape=shape, backward_shape=shape, place=wgrad_place(place)))


BUILT_IN: Final[Mapping[str, Callable[[ChunkShape, int], Schedule]]] = {
    "serial": serial,
    "combined_1f1b": combined_1f1b,
    "forward_forward": forward_forward,
    "forward_only": forward_only,
}
"""The built-in schedules by name."""


def serial_turn(
    forward_shape: ChunkShape | None, backward_shape: ChunkShape | None, forward: int, backward: int
) -> Iterator[Step]:
    """One microbatch forward, then one backward; of ``forward_shape`` and ``backward_shape`` either may be None."""
    return interleaved_turn(forward_shape, backward_shape, [forward], [backward])


def combined_turn(
    forward_shape: ChunkShape | None,
    backward_shape: ChunkShape | None,
    forward: int,
    backward: int,
    *,
    order: str,
    megatron_wgrad: bool,
) -> Iterator[Step]:
    """One microbatch forward beside one backward.

    Args:
        forward_shape, backward_shape, forward, backward, order: as for ``pair_steps``.
        megatron_wgrad: weight gradients where Megatron-Core has them, else directly after their ``B``.

    Raises:
        ScheduleError: a malformed order.
    """
    steps = pair_steps(forward_shape, backward_shape, forward=forward, backward=backward, order=order)
    if megatron_wgrad:
        return steps
    return place_wgrad(steps, forward_shape=forward_shape, backward_shape=backward_shape, place=WgradPlace.AFTER_B)


def interleaved_turn(
    forward_shape: ChunkShape | None,
    backward_shape: ChunkShape | None,
    forward: Iterable[int],
    backward: Iterable[int],
) -> Iterator[Step]:
    """Some microbatches forward, interleaved, then some backward, interleaved.

    Args:
        forward_shape, backward_shape: the chunks' shapes; None: nothing goes that way.
        forward, backward: numbers of the microbatches.
    """
    if forward_shape is not None:
        yield from interleave(*(forward_steps(forward_shape, m) for m in forward), shape=forward_shape)
    if backward_shape is not None:
        yield from interleave(*(backward_steps(backward_shape, m) for m in backward), shape=backward_shape)


def wgrad_place(place: WgradPlace | str) -> WgradPlace:
    """The place of this name.

    Raises:
        ScheduleError: there is none.
    """
    if place not in tuple(WgradPlace):
        raise ScheduleError(f"unknown place {place!r} for weight gradients; choose one of {', '.join(WgradPlace)}")
    return WgradPlace(place)


def _range(num_microbatches: int) -> range:
    check_argument("num_microbatches", num_microbatches, int)
    if num_microbatches < 1:
        raise ScheduleError(f"num_microbatches={num_microbatches}; give 1 or more")
    return range(num_microbatches)


def _groups(num_microbatches: int, group: int) -> Sequence[range]:
    check_argument("group", group, int)
    if group < 1:
        raise ScheduleError(f"group={group}; give at least 1 microbatch a group")
    everyone = _range(num_microbatches)
    return [everyone[start : start + group] for start in everyone[::group]]
