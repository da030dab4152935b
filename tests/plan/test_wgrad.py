"""Where deferred weight gradients go."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from layernodes.plan import pairs, schedules
from layernodes.plan.generators import forward_steps
from layernodes.plan.schedule import Schedule
from layernodes.plan.shape import ChunkShape
from layernodes.plan.validate import validate
from layernodes.plan.wgrad import WgradPlace
from layernodes.slots import Phase
from layernodes.testing import chunk_shapes
from tests.support.strategies import valid_schedules

SHAPE = ChunkShape.of(["moe", "moe"], post_process=False, wgrad=["pre_dispatch_computation", "mlp"])
PRE, MLP = "pre_dispatch_computation", "mlp"


def backward(place: WgradPlace) -> list[str]:
    """The backward of one microbatch with its W steps at a place."""
    schedule = schedules.deferred(schedules.serial(SHAPE, 1), SHAPE, place)
    validate(schedule, SHAPE, num_microbatches=1)
    return [str(step).replace("_computation", "") for step in schedule if step.phase is not Phase.F]


@pytest.mark.parametrize(
    ("place", "expected"),
    [
        (
            WgradPlace.AFTER_B,
            "B0.L1.moe_combine B0.L1.mlp W0.L1.mlp B0.L1.moe_dispatch B0.L1.pre_dispatch W0.L1.pre_dispatch "
            "B0.L0.moe_combine B0.L0.mlp W0.L0.mlp B0.L0.moe_dispatch B0.L0.pre_dispatch W0.L0.pre_dispatch "
            "B0.pre_process",
        ),
        (
            WgradPlace.NEXT_COMM,
            "B0.L1.moe_combine B0.L1.mlp B0.L1.moe_dispatch W0.L1.mlp B0.L1.pre_dispatch "
            "B0.L0.moe_combine W0.L1.pre_dispatch B0.L0.mlp B0.L0.moe_dispatch W0.L0.mlp B0.L0.pre_dispatch "
            "B0.pre_process W0.L0.pre_dispatch",
        ),
        (
            WgradPlace.END,
            "B0.L1.moe_combine B0.L1.mlp B0.L1.moe_dispatch B0.L1.pre_dispatch "
            "B0.L0.moe_combine B0.L0.mlp B0.L0.moe_dispatch B0.L0.pre_dispatch B0.pre_process "
            "W0.L1.mlp W0.L1.pre_dispatch W0.L0.mlp W0.L0.pre_dispatch",
        ),
        (
            WgradPlace.FIRST_LAYER_LAST,
            "B0.L1.moe_combine B0.L1.mlp W0.L1.mlp B0.L1.moe_dispatch B0.L1.pre_dispatch W0.L1.pre_dispatch "
            "B0.L0.moe_combine B0.L0.mlp W0.L0.mlp B0.L0.moe_dispatch B0.L0.pre_dispatch W0.L0.pre_dispatch "
            "B0.pre_process",
        ),
    ],
)
def test_places(place: WgradPlace, expected: str) -> None:
    """Each place, worked by hand."""
    assert backward(place) == expected.split()


def test_first_layer_waits_for_the_pass_to_end() -> None:
    """Beside a forward, the first layer's W waits until all layers are done, as in Megatron-Core."""
    ours = schedules.deferred(schedules.combined_1f1b(SHAPE, 2), SHAPE, "first_layer_last")
    megatron = schedules.combined_1f1b(SHAPE, 2, megatron_wgrad=True)
    for schedule in (ours, megatron):
        texts = [str(step) for step in schedule]
        at = texts.index(f"W0.L0.{PRE}")
        assert texts[at - 1 : at + 2] == [f"B0.L0.{PRE}", f"W0.L0.{PRE}", "B0.pre_process"]


def test_pass_through_is_no_communication() -> None:
    """A named pass-through dispatch opens no window."""
    shape = ChunkShape.of(["dense"], pre_process=False, post_process=False, wgrad=["mlp"])
    text = f"F0.L0.{PRE} F0.L0.mlp B0.L0.mlp B0.L0.moe_dispatch B0.L0.{PRE}"
    assert str(schedules.deferred(Schedule.parse(text), shape)[-1]) == "W0.L0.mlp"


@settings(deadline=None)
@given(st.data(), chunk_shapes(), st.integers(0, 3), st.sampled_from(WgradPlace))
def test_any_valid_schedule_stays_valid(data: st.DataObject, shape: ChunkShape, n: int, place: WgradPlace) -> None:
    """W steps move, everything else stays; with or without W steps to begin with."""
    schedule = data.draw(valid_schedules(shape, n))
    moved = schedules.deferred(schedule, shape, place)
    validate(moved, shape, num_microbatches=n)
    bare = Schedule(step for step in schedule if step.phase is not Phase.W)
    assert Schedule(step for step in moved if step.phase is not Phase.W) == bare
    assert schedules.deferred(bare, shape, place) == moved


def test_first_layer_waits_for_a_longer_forward() -> None:
    """In a pair whose forward is longer, the first layer's W comes after all of the forward's layers."""
    longer = ChunkShape.of(["moe"] * 3)
    for pair in (
        pairs.deferred(pairs.combined_1f1b(longer, SHAPE), longer, SHAPE, "first_layer_last"),
        pairs.combined_1f1b(longer, SHAPE, megatron_wgrad=True),
    ):
        texts = [str(step) for step in pair]
        at = texts.index(f"W1.L0.{PRE}")
        assert texts[at - 1 : at + 2] == ["F0.L2.moe_combine", f"W1.L0.{PRE}", "F0.post_process"]


def test_only_the_first_layer_waits() -> None:
    """While a first layer's W waits, those of other modules still follow their B."""
    shape = ChunkShape.of(["moe"], pre_process=False, post_process=False, wgrad=True)
    forward = [step for m in (0, 1) for step in forward_steps(shape, m)]
    backward = Schedule.parse(
        f"B0.L0.moe_combine B1.L0.moe_combine B0.L0.mlp B0.L0.moe_dispatch B0.L0.{PRE} "
        f"B1.L0.mlp B1.L0.moe_dispatch B1.L0.{PRE}"
    )
    placed = schedules.deferred(Schedule(forward) + backward, shape, "first_layer_last")
    validate(placed, shape, num_microbatches=2)
    assert str(placed[-7:]).split() == [
        f"B0.L0.{PRE}", "B1.L0.mlp", "W1.L0.mlp", "B1.L0.moe_dispatch", f"B1.L0.{PRE}", f"W0.L0.{PRE}", f"W1.L0.{PRE}",
    ]  # fmt: skip


@pytest.mark.parametrize("order", ["F0 B0 F1 B1", "F0 F1 B0 B1"])
def test_first_layer_waits_for_the_next_pass_where_the_chunk_has_no_ends(order: str) -> None:
    """Of layers alone: until the first step, named or not passed through, of any other pass."""
    shape = ChunkShape.of(["dense", "dense"], pre_process=False, post_process=False, wgrad=[PRE, MLP])
    forward = [f"L0.{PRE}", "L0.mlp", f"L1.{PRE}", "L1.mlp"]
    steps = [f"{p}.{at}" for p in order.split() for at in (forward if p[0] == "F" else reversed(forward))]
    found = [str(step) for step in schedules.deferred(Schedule.parse(" ".join(steps)), shape, "first_layer_last")]
    after = found.index(f"W0.L0.{PRE}")
    following = f"F1.L0.{PRE}" if order.startswith("F0 B0") else "B1.L1.mlp"
    assert found[after - 1 : after + 2] == [f"B0.L0.{PRE}", f"W0.L0.{PRE}", following]
    assert found[-1] == f"W1.L0.{PRE}"
