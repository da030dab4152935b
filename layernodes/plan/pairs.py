"""The built-in schedules for pairs: the forward of one chunk beside the backward of another.

Each takes a forward and a backward shape, either of which may be None, and has the definition of its namesake in
``schedules``. Microbatch 0 goes forward, microbatch 1 backward.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Final

from layernodes.plan.arguments import check_argument
from layernodes.plan.generators import EARLY_RELEASE_ORDER, MEGATRON_ORDER
from layernodes.plan.schedule import PairSchedule
from layernodes.plan.schedules import combined_turn, interleaved_turn, serial_turn, wgrad_place
from layernodes.plan.shape import ChunkShape, check_shapes
from layernodes.plan.wgrad import WgradPlace, place_wgrad, warn_where_nothing_is_deferred


def serial(forward_shape: ChunkShape | None, backward_shape: ChunkShape | None) -> PairSchedule:
    """The whole forward, then the whole backward; of ``forward_shape`` and ``backward_shape`` either may be None."""
    check_shapes(forward_shape=forward_shape, backward_shape=backward_shape)
    return PairSchedule(serial_turn(forward_shape, backward_shape, 0, 1))


def combined_1f1b(
    forward_shape: ChunkShape | None,
    backward_shape: ChunkShape | None,
    *,
    early_release: bool = False,
    megatron_wgrad: bool = False,
    order: str | None = None,
) -> PairSchedule:
    """Layer beside layer, in Megatron-Core's order.

    Args:
        forward_shape, backward_shape: shapes of the two chunks; either may be None.
        early_release, megatron_wgrad, order: as for ``schedules.combined_1f1b``.

    Raises:
        ScheduleError: a malformed order.
    """
    check_shapes(forward_shape=forward_shape, backward_shape=backward_shape)
    order = order or (EARLY_RELEASE_ORDER if early_release else MEGATRON_ORDER)
    return PairSchedule(combined_turn(forward_shape, backward_shape, 0, 1, order=order, megatron_wgrad=megatron_wgrad))


def forward_forward(forward_shape: ChunkShape | None, backward_shape: ChunkShape | None) -> PairSchedule:
    """Forwards, then backwards; with the one of each that a pair has, the same as ``serial``, ``forward_shape`` and
    ``backward_shape`` too."""
    check_shapes(forward_shape=forward_shape, backward_shape=backward_shape)
    return PairSchedule(interleaved_turn(forward_shape, backward_shape, [0], [1]))


def deferred(
    schedule: PairSchedule,
    forward_shape: ChunkShape | None,
    backward_shape: ChunkShape | None,
    place: WgradPlace | str = WgradPlace.NEXT_COMM,
) -> PairSchedule:
    """The same pair with the weight gradients of the backward chunk at a chosen place, as ``schedules.deferred``.

    Args:
        schedule: a valid pair of these shapes.
        forward_shape, backward_shape: shapes of the two chunks; either may be None.
        place: ``"after_b"``, ``"next_comm"``, ``"end"`` or ``"first_layer_last"``.

    Raises:
        ScheduleError: an unknown place.
    """
    check_argument("schedule", schedule, PairSchedule)
    check_shapes(forward_shape=forward_shape, backward_shape=backward_shape)
    warn_where_nothing_is_deferred(schedule, backward_shape)
    return PairSchedule(
        place_wgrad(schedule, forward_shape=forward_shape, backward_shape=backward_shape, place=wgrad_place(place))
    )


BUILT_IN: Final[Mapping[str, Callable[[ChunkShape | None, ChunkShape | None], PairSchedule]]] = {
    "serial": serial,
    "combined_1f1b": combined_1f1b,
    "early_release": partial(combined_1f1b, early_release=True),
    "forward_forward": forward_forward,
}
"""The built-in pair schedules by name."""
