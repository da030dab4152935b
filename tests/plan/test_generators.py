"""The parts that schedules are composed of."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from layernodes.errors import ScheduleError
from layernodes.plan.generators import backward_steps, forward_steps, interleave, pair_steps
from layernodes.plan.schedule import Schedule
from layernodes.plan.shape import ChunkShape, ExtraSlot
from layernodes.plan.step import Step
from layernodes.plan.validate import validate
from layernodes.slots import Slot, StreamType
from layernodes.testing import chunk_shapes
from tests.plan.test_step import STEPS


def texts(steps: object) -> list[str]:
    return [str(step) for step in steps]  # type: ignore[attr-defined]


def test_one_microbatch() -> None:
    """Forward in order, backward in reverse with W after B; pass-throughs left out."""
    shape = ChunkShape.of(["dense"], wgrad=["mlp"])
    assert texts(forward_steps(shape, 2)) == [
        "F2.pre_process", "F2.L0.pre_dispatch_computation", "F2.L0.mlp", "F2.post_process",
    ]  # fmt: skip
    assert texts(backward_steps(shape, 2)) == [
        "B2.post_process", "B2.L0.mlp", "W2.L0.mlp", "B2.L0.pre_dispatch_computation", "B2.pre_process",
    ]  # fmt: skip


def test_interleave_by_communication() -> None:
    """Each turn ends with a communication, so that the next one computes beside it."""
    shape = ChunkShape.of(["moe"], pre_process=False)
    assert texts(interleave(forward_steps(shape, 0), forward_steps(shape, 1))) == [
        "F0.L0.pre_dispatch_computation", "F0.L0.moe_dispatch", "F1.L0.pre_dispatch_computation", "F1.L0.moe_dispatch",
        "F0.L0.mlp", "F0.L0.moe_combine", "F1.L0.mlp", "F1.L0.moe_combine", "F0.post_process", "F1.post_process",
    ]  # fmt: skip


def test_interleave_by_steps_and_shape() -> None:
    """Turns of a number of steps; or by the streams of a shape with communication of its own."""
    a, b = (Schedule.parse(" ".join(f"F{m}.L0.s{n}" for n in range(3))) for m in (0, 1))
    assert texts(interleave(a, b, num_steps=2)) == [
        "F0.L0.s0", "F0.L0.s1", "F1.L0.s0", "F1.L0.s1", "F0.L0.s2", "F1.L0.s2",
    ]  # fmt: skip
    with pytest.raises(ScheduleError, match="num_steps=0"):
        list(interleave(a, num_steps=0))
    own = ChunkShape.of(["dense"], extra_slots=[ExtraSlot("x", after=Slot.MLP, stream=StreamType.COMM)])
    woven = texts(interleave(forward_steps(own, 0), forward_steps(own, 1), shape=own))
    assert woven.index("F0.L0.x") + 1 == woven.index("F1.pre_process")


@settings(deadline=None)
@given(st.lists(st.lists(STEPS, max_size=6), max_size=4), st.none() | st.integers(1, 3))
def test_interleave_keeps_everything_in_order(sequences: list[list[Step]], num_steps: int | None) -> None:
    """Nothing is lost, nothing reordered within a sequence."""
    tagged = [[Step(s.phase, number, s.layer, s.slot) for s in steps] for number, steps in enumerate(sequences)]
    woven = list(interleave(*tagged, num_steps=num_steps))
    assert [[step for step in woven if step.microbatch == number] for number in range(len(tagged))] == tagged


def test_an_order_of_ones_own() -> None:
    """A user's order of two layers, in one line."""
    shape = ChunkShape.of(["moe"], pre_process=False, post_process=False)
    order = "F.pre F.dispatch B.tail B.combine B.mlp F.mlp F.combine F.tail B.dispatch B.pre"
    assert texts(pair_steps(shape, shape, forward=1, backward=0, order=order)) == [
        "F1.L0.pre_dispatch_computation", "F1.L0.moe_dispatch", "B0.L0.moe_combine", "B0.L0.mlp",
        "F1.L0.mlp", "F1.L0.moe_combine", "B0.L0.moe_dispatch", "B0.L0.pre_dispatch_computation",
    ]  # fmt: skip
    for bad in ("F.pre F.pre", "F.attn", "X.pre", "W.tail"):
        with pytest.raises(ScheduleError, match=r"unknown or twice; use each once of F\.pre"):
            list(pair_steps(shape, shape, order=bad))


@settings(deadline=None)
@given(chunk_shapes(), st.booleans())
def test_own_slots_never_break_the_order(shape: ChunkShape, alone: bool) -> None:
    """Wherever own slots stand and on whatever stream, a pair's forward and backward stay valid."""
    first = Schedule(forward_steps(shape, 0))
    pair = Schedule(pair_steps(None if alone else shape, shape, forward=1, backward=0))
    last = () if alone else backward_steps(shape, 1)
    validate(first + pair + Schedule(last), shape, num_microbatches=1 if alone else 2)


def test_own_slots_join_work_of_their_stream() -> None:
    """Computation after combine waits for it beside the other microbatch's backward, not before that."""
    own = [ExtraSlot("x", after=Slot.MOE_COMBINE), ExtraSlot("y", after=Slot.MLP)]
    shape = ChunkShape.of(["moe"], pre_process=False, post_process=False, extra_slots=own)
    woven = texts(pair_steps(shape, shape))
    assert woven[-5:] == [
        "F0.L0.mlp", "F0.L0.y", "F0.L0.moe_combine", "B1.L0.pre_dispatch_computation", "F0.L0.x",
    ]  # fmt: skip
