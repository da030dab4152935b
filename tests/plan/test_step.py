"""Steps: text form, refusals, equality."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from layernodes.errors import ScheduleError, ScheduleParseError
from layernodes.plan.step import Step
from layernodes.slots import Phase, Slot

STEPS = st.builds(
    Step,
    st.sampled_from(Phase),
    st.integers(0, 10**9 - 1),
    st.none() | st.integers(0, 10**9 - 1),
    st.from_regex(r"[a-z_][a-zA-Z0-9_]{0,20}", fullmatch=True),
)


@settings(deadline=None)
@given(STEPS)
def test_text_reads_back(step: Step) -> None:
    """parse(str(step)) is the step, and so is its pickle."""
    assert Step.parse(str(step)) == step
    assert hash(Step.parse(str(step))) == hash(step)
    assert pickle.loads(pickle.dumps(step)) == step


def test_text_of_design() -> None:
    """The texts that the documentation shows."""
    assert str(Step(Phase.F, 0, 3, Slot.MOE_DISPATCH)) == "F0.L3.moe_dispatch"
    assert str(Step(Phase.F, 0, None, "pre_process")) == "F0.pre_process"
    assert Step.parse("B1.post_process") == Step(Phase.B, 1, None, "post_process")


def test_enum_and_text_make_the_same_step() -> None:
    """A slot given as enum member or as text makes no difference, in hash and repr neither."""
    by_enum, by_text = Step(Phase.W, 1, 0, Slot.MLP), Step(Phase("W"), 1, 0, "mlp")
    assert by_enum == by_text
    assert hash(by_enum) == hash(by_text)
    assert repr(by_enum) == repr(by_text)
    assert type(by_enum.slot) is str


def test_a_number_is_a_whole_one() -> None:
    """What counts as one in Python becomes one, so that the text reads back; all else is refused."""
    step = Step(Phase.F, True, np.int64(3), "mlp")  # type: ignore[arg-type]
    assert str(step) == "F1.L3.mlp"
    assert Step.parse(str(step)) == step
    for wrong in (1.0, "1", None, -1, 10**9):
        with pytest.raises(ScheduleError, match="is no microbatch or layer number"):
            Step(Phase.F, wrong, 0, "mlp")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "column", "expected"),
    [
        ("", 1, "phase"),
        ("X0.mlp", 1, "phase"),
        ("f0.mlp", 1, "phase"),
        (" F0.mlp", 1, "phase"),
        ("F", 2, "microbatch"),
        ("F-1.mlp", 2, "microbatch"),
        ("F٣.mlp", 2, "microbatch"),
        ("F0", 3, "'.'"),
        ("F01.mlp", 3, "leading zeros"),
        ("F1234567890.mlp", 11, "9 digits"),
        ("F0.L3", 6, "slot"),
        ("F0.layer3.mlp", 4, "such as L0"),
        ("F0.3.mlp", 4, "such as L0"),
        ("F0.L03.mlp", 6, "leading zeros"),
        ("F0.L1234567890.mlp", 14, "9 digits"),
        ("F0.L3.", 7, "name of a slot"),
        ("F0.L3.L4", 7, "name of a slot"),
        ("F0.", 4, "name of a slot"),
        ("F0.3lp", 4, "name of a slot"),
        ("F0.L3.mlp.x", 10, "end"),
        ("F0.L3.mlp ", 10, "end"),
        ("F0.L3.mlp\n", 10, "end"),
        ("F0.L3.mlp,", 10, "end"),
        ("F0.L3.mlpé", 10, "end"),
        ("F0.L3\n", 6, "slot"),
    ],
)
def test_malformed_text(text: str, column: int, expected: str) -> None:
    """The error points at the first character that does not fit and says what would."""
    with pytest.raises(ScheduleParseError, match="cannot be read") as caught:
        Step.parse(text)
    assert (caught.value.line, caught.value.column) == (1, column)
    assert expected in caught.value.expected


@settings(deadline=None)
@given(st.text(alphabet="FBW0129L.mx_ \n", max_size=12))
def test_a_text_is_a_step_or_explained(text: str) -> None:
    """Every text either reads and prints back exactly, or is refused at a column inside it or just after it."""
    try:
        assert str(Step.parse(text)) == text
    except ScheduleParseError as error:
        assert 1 <= error.column <= len(text) + 1


@pytest.mark.parametrize(
    ("phase", "microbatch", "layer", "slot"),
    [
        ("X", 0, 0, "mlp"),
        ("F", -1, 0, "mlp"),
        ("F", 0, -1, "mlp"),
        ("F", 10**9, 0, "mlp"),
        ("F", 0, 0, "a b"),
        ("F", 0, 0, "L1"),
    ],
)
def test_impossible_steps(phase: str, microbatch: int, layer: int, slot: str) -> None:
    """A step that could not be read back cannot be made."""
    with pytest.raises(ScheduleError):
        Step(phase, microbatch, layer, slot)  # type: ignore[arg-type]
