"""Built-in schedules: valid for every shape; Megatron-Core's order is Megatron-Core's."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from layernodes.errors import ScheduleError
from layernodes.plan import pairs, schedules
from layernodes.plan.schedule import Schedule
from layernodes.plan.shape import ChunkShape
from layernodes.plan.validate import validate
from layernodes.plan.wgrad import WgradPlace
from layernodes.slots import Phase
from layernodes.testing import chunk_shapes
from tests import oracle
from tests.support.strategies import plain


def every_built_in(shape: ChunkShape, n: int) -> dict[str, Schedule]:
    """All training schedules with all their options."""
    result = {
        "serial": schedules.serial(shape, n),
        "forward_forward 1": schedules.forward_forward(shape, n, group=1),
        "forward_forward": schedules.forward_forward(shape, n),
        "forward_forward 3": schedules.forward_forward(shape, n, group=3),
    }
    for early in (False, True):
        for megatron in (False, True):
            result[f"combined {early} {megatron}"] = schedules.combined_1f1b(
                shape, n, early_release=early, megatron_wgrad=megatron
            )
    for name, schedule in tuple(result.items()):
        for place in WgradPlace:
            result[f"{name} {place}"] = schedules.deferred(schedule, shape, place)
    return result


@settings(deadline=None)
@given(chunk_shapes(), st.integers(1, 8))
def test_valid_for_every_shape(shape: ChunkShape, n: int) -> None:
    """Every built-in with every option is valid, says the validator; leaves pass-throughs out; says the oracle too."""
    built = every_built_in(shape, n)
    for schedule in built.values():
        validate(schedule, shape, num_microbatches=n)
        assert len(schedule) == len(built["serial"])
    if n <= 2:
        for schedule in set(built.values()):
            assert oracle.faults([str(step) for step in schedule], plain(shape), n) == []
    for group in (1, 2):
        forward = schedules.forward_only(shape, n, group=group)
        validate(forward, shape, num_microbatches=n, mode="forward")


@pytest.mark.parametrize("num_microbatches", [1, 2, 8])
@pytest.mark.parametrize("wgrad", [False, True])
@pytest.mark.parametrize("mtp", [0, 1])
@pytest.mark.parametrize("layers", [[], ["moe"], ["dense"], ["dense", "moe", "moe"], ["moe"] * 5])
def test_valid_for_usual_shapes(layers: list[str], mtp: int, wgrad: bool, num_microbatches: int) -> None:
    """The shapes people have, whatever the draws of the property were."""
    for split_combine in (False, True):
        shape = ChunkShape.of(layers, mtp=mtp, wgrad=wgrad, split_combine=split_combine)
        for schedule in every_built_in(shape, num_microbatches).values():
            validate(schedule, shape, num_microbatches=num_microbatches)


def test_serial_and_forward_forward() -> None:
    """The order of the passes of whole microbatches."""
    shape = ChunkShape.of([], post_process=False)
    assert str(schedules.serial(shape, 2)).split() == [
        "F0.pre_process", "B0.pre_process", "F1.pre_process", "B1.pre_process",
    ]  # fmt: skip
    assert str(schedules.forward_forward(shape, 3)).split() == [
        "F0.pre_process", "F1.pre_process", "B0.pre_process", "B1.pre_process", "F2.pre_process", "B2.pre_process",
    ]  # fmt: skip


def test_combined_by_hand() -> None:
    """The middle turn of two microbatches over one MoE layer, with early release and without."""
    shape = ChunkShape.of(["moe"], wgrad=True)
    late = [
        "F1.pre_process", "B0.post_process",
        "B0.L0.moe_combine", "F1.L0.pre_dispatch_computation", "B0.L0.mlp", "F1.L0.moe_dispatch", "W0.L0.mlp",
        "B0.L0.moe_dispatch", "F1.L0.mlp", "F1.L0.moe_combine", "B0.L0.pre_dispatch_computation",
        "W0.L0.pre_dispatch_computation", "F1.post_process", "B0.pre_process",
    ]  # fmt: skip
    early = [*late[:8], late[10], *late[8:10], *late[11:]]
    after_b = [text for text in late if text[0] != "W"]
    after_b.insert(after_b.index("B0.L0.mlp") + 1, "W0.L0.mlp")
    after_b.insert(after_b.index("B0.L0.pre_dispatch_computation") + 1, "W0.L0.pre_dispatch_computation")
    for expected, options in (
        (late, {"megatron_wgrad": True}),
        (early, {"megatron_wgrad": True, "early_release": True}),
        (after_b, {}),
    ):
        schedule = schedules.combined_1f1b(shape, 2, **options)
        alone = len(schedules.forward_only(shape, 1))
        assert str(schedule[alone : alone + len(expected)]).split() == expected


def test_deferred_says_where_nothing_is_deferred(caplog: pytest.LogCaptureFixture) -> None:
    """W steps are taken out, none come in, and a warning says what to change; silent where none could be expected."""
    on, off, empty = ChunkShape.of(["moe"], wgrad=True), ChunkShape.of(["moe"]), ChunkShape.of([])
    schedules.deferred(schedules.serial(on, 2), on)
    schedules.deferred(schedules.serial(empty, 2), empty)
    schedules.deferred(schedules.forward_only(off, 2), off)
    pairs.deferred(pairs.serial(off, on), off, on)
    pairs.deferred(pairs.serial(off, None), off, None)
    assert caplog.messages == []
    schedule = schedules.deferred(schedules.serial(on, 2), off)
    assert schedule == schedules.serial(off, 2)
    assert all(step.phase is not Phase.W for step in schedule)
    pairs.deferred(pairs.serial(on, off), on, off)
    assert len(caplog.messages) == 2
    assert all("build the chunk with wgrad='auto'" in message for message in caplog.messages)


def test_refusals() -> None:
    """Numbers, groups and places that make no sense."""
    shape = ChunkShape.of(["moe"])
    for build in schedules.BUILT_IN.values():
        with pytest.raises(ScheduleError, match="num_microbatches=-1; give 1 or more"):
            build(shape, -1)
    with pytest.raises(ScheduleError, match="group=0"):
        schedules.forward_forward(shape, 2, group=0)
    with pytest.raises(ScheduleError, match="choose one of after_b, next_comm, end, first_layer_last"):
        schedules.deferred(Schedule(), shape, "later")
    with pytest.raises(ScheduleError, match="unknown or twice"):
        schedules.combined_1f1b(shape, 2, order="F.attn")
