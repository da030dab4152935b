"""The dependency rule: what must have run before a step."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from layernodes.errors import ScheduleError
from layernodes.plan import schedules
from layernodes.plan.rules import NONE, Rules
from layernodes.plan.schedule import Schedule
from layernodes.plan.shape import ChunkShape
from layernodes.slots import Phase, StreamType
from layernodes.testing import chunk_shapes
from tests import oracle
from tests.support.strategies import plain, valid_schedules


def named(schedule: Schedule, rules: Rules) -> dict[str, list[str]]:
    """Predecessors by text."""
    before = rules.dependencies(schedule)
    return {str(step): [str(schedule[p]) for p in before[index]] for index, step in enumerate(schedule)}


def test_by_hand() -> None:
    """One dense layer, deferred: a line of forward and backward, and W after its B; pass-throughs are skipped."""
    shape = ChunkShape.of(["dense"], wgrad=True)
    assert named(schedules.serial(shape, 1), Rules.of(shape, 1)) == {
        "F0.pre_process": [],
        "F0.L0.pre_dispatch_computation": ["F0.pre_process"],
        "F0.L0.mlp": ["F0.L0.pre_dispatch_computation"],
        "F0.post_process": ["F0.L0.mlp"],
        "B0.post_process": ["F0.post_process"],
        "B0.L0.mlp": ["B0.post_process"],
        "W0.L0.mlp": ["B0.L0.mlp"],
        "B0.L0.pre_dispatch_computation": ["B0.L0.mlp"],
        "W0.L0.pre_dispatch_computation": ["B0.L0.pre_dispatch_computation"],
        "B0.pre_process": ["B0.L0.pre_dispatch_computation"],
    }


def test_named_pass_throughs_join_the_line() -> None:
    """A pass-through that the schedule names is a step like any other."""
    shape = ChunkShape.of(["dense"], pre_process=False, post_process=False)
    schedule = Schedule.parse("F0.L0.pre_dispatch_computation F0.L0.moe_dispatch F0.L0.mlp")
    assert named(schedule, Rules.of(shape, 1, "forward"))["F0.L0.mlp"] == ["F0.L0.moe_dispatch"]


def test_stores_are_queues() -> None:
    """A module's W follows the W of the B before its own; the order of the Bs is the schedule's."""
    shape = ChunkShape.of(["dense"], pre_process=False, post_process=False, wgrad=["mlp"])
    slots = "L0.pre_dispatch_computation", "L0.mlp"
    forwards = [f"F{m}.{slot}" for m in (0, 1) for slot in slots]
    backwards = ["B1.L0.mlp", "B0.L0.mlp", "W1.L0.mlp", "W0.L0.mlp", f"B0.{slots[0]}", f"B1.{slots[0]}"]
    before = named(Schedule.parse(" ".join(forwards + backwards)), Rules.of(shape, 2))
    assert before["W1.L0.mlp"] == ["B1.L0.mlp"]
    assert before["W0.L0.mlp"] == ["B0.L0.mlp", "W1.L0.mlp"]


def test_ids() -> None:
    """Ids are dense, before is smaller, optional and streams are those of the shape."""
    shape = ChunkShape.of(["moe", "dense"], mtp=1, wgrad=True)
    rules = Rules.of(shape, 3)
    assert [rules.ids[step] for step in rules.steps] == list(range(len(rules.steps)))
    assert all(before < number for number, before in enumerate(rules.before))
    for number, step in enumerate(rules.steps):
        slot = shape.find(step)
        assert slot is not None
        assert rules.streams[number] is slot.stream
        assert rules.optional[number] == slot.passthrough
        assert (rules.wgrad_of[number] != NONE) == (step.phase is Phase.B and slot.wgrad)
    assert len(list(rules.required())) == len(schedules.serial(shape, 3))
    assert StreamType.COMM in rules.streams


@settings(deadline=None)
@given(st.data(), chunk_shapes(max_layers=3), st.integers(0, 3))
def test_closure_is_the_specification(data: st.DataObject, shape: ChunkShape, num_microbatches: int) -> None:
    """Followed through, the predecessors of a step are exactly the steps that the oracle puts before it."""
    schedule = data.draw(valid_schedules(shape, num_microbatches))
    chunk = plain(shape)
    before = Rules.of(shape, num_microbatches).dependencies(schedule)
    everything: list[set[int]] = []
    for index, direct in enumerate(before):
        assert all(p < index for p in direct)
        everything.append(set(direct).union(*(everything[p] for p in direct)))
    texts = [str(step) for step in schedule]
    for index, text in enumerate(texts):
        found = {texts[p] for p in everything[index]}
        if text[0] != "W":
            assert found == {other for other in texts if other != text and oracle.must_precede(other, text, chunk)}
        else:
            assert found >= {other for other in texts if other != text and oracle.must_precede(other, text, chunk)}


def test_refusals() -> None:
    """Numbers and modes that make no sense."""
    shape = ChunkShape.of(["moe"])
    with pytest.raises(ScheduleError, match="num_microbatches=-1"):
        Rules.of(shape, -1)
    for mode in ("pair", "backward"):
        with pytest.raises(ScheduleError, match="unknown mode"):
            Rules.of(shape, 1, mode)
    with pytest.raises(KeyError):
        Rules.of(shape, 1).dependencies(Schedule.parse("F1.pre_process"))
