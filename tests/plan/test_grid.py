"""The grid."""

from __future__ import annotations

import pytest

from layernodes.errors import ScheduleError
from layernodes.plan import pairs, schedules
from layernodes.plan.schedule import Schedule
from layernodes.plan.shape import ChunkShape, ExtraSlot
from layernodes.slots import Slot, StreamType


def test_columns_are_streams() -> None:
    """Computation stands left, communication right, one row a step."""
    schedule = schedules.forward_only(ChunkShape.of(["moe"], post_process=False), 1)
    assert schedule.grid() == (
        "   step  compute                         comm\n"
        "      0  F0.pre_process\n"
        "      1  F0.L0.pre_dispatch_computation\n"
        "      2                                  F0.L0.moe_dispatch\n"
        "      3  F0.L0.mlp\n"
        "      4                                  F0.L0.moe_combine"
    )


def test_mark_shows_a_window() -> None:
    """With a mark, only the rows around it are drawn, with an arrow at it and dots for the rest."""
    schedule = Schedule.parse(" ".join(f"F0.L{n}.mlp" for n in range(10)))
    assert schedule.grid(mark=4, context=1) == (
        "   step  compute    comm\n    ...\n      3  F0.L3.mlp\n->    4  F0.L4.mlp\n      5  F0.L5.mlp\n    ..."
    )
    assert schedule.grid(mark=[0, 9], context=0).splitlines()[1:] == [
        "->    0  F0.L0.mlp",
        "    ...",
        "->    9  F0.L9.mlp",
    ]


def test_marks_that_are_not_there() -> None:
    """A mark outside the schedule is refused."""
    for mark in (-1, 1):
        with pytest.raises(ScheduleError, match="cannot mark step"):
            Schedule.parse("F0.L0.mlp").grid(mark=mark)


def test_streams_of_the_shape() -> None:
    """A shape says where own slots stand; pairs take two shapes."""
    own = ChunkShape.of(
        ["dense"],
        pre_process=False,
        post_process=False,
        extra_slots=[ExtraSlot("x", after=Slot.MLP, stream=StreamType.COMM)],
    )
    schedule = schedules.serial(own, 1)
    assert [line.index("F0.L0.x") > 20 for line in schedule.grid(own).splitlines() if "F0.L0.x" in line] == [True]
    assert [line.index("F0.L0.x") > 20 for line in schedule.grid().splitlines() if "F0.L0.x" in line] == [False]
    pair = pairs.serial(None, own)
    assert [line.index("B1.L0.x") > 20 for line in pair.grid(None, own).splitlines() if "B1.L0.x" in line] == [True]


def test_empty() -> None:
    """An empty schedule has a heading only."""
    assert Schedule().grid() == "   step  compute  comm"
