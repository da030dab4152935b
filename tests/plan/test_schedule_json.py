"""The JSON form of schedules: every fault has line and column."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from layernodes.errors import ScheduleParseError
from layernodes.plan import schedule_json
from layernodes.plan.schedule import PairSchedule, Schedule


def test_form() -> None:
    """What is written, so that files stay readable over releases; format, version and kind may be left out."""
    assert json.loads(Schedule.parse("F0.L0.mlp").to_json()) == {
        "format": "layernodes.schedule", "version": 1, "kind": "schedule", "steps": ["F0.L0.mlp"],
    }  # fmt: skip
    assert json.loads(PairSchedule().to_json())["kind"] == "pair"
    assert Schedule.from_json('{"steps": ["F0.L0.mlp"]}') == Schedule.parse("F0.L0.mlp")


@pytest.mark.parametrize(
    ("text", "places"),
    [
        ("", [(1, 1)]),
        ("{\n 'steps': []}", [(2, 2)]),
        ('{"steps": [\n"F0.a"\n3]}', [(3, 1)]),
        ("[]", [(1, 1)]),
        (" {}", [(1, 2)]),
        ('{"steps": 3}', [(1, 11)]),
        ('{"steps": {"0": "F0.a"}}', [(1, 11)]),
        ('{"steps": [],\n "version": 2,\n "extra": [[1]]}', [(2, 13), (3, 11)]),
        ('{"steps": [],\n "format": "x",\n "kind": "y"}', [(2, 12), (3, 10)]),
        ('{"steps": [\n "F0.a",\n 3,\n "F0.b", null]}', [(3, 2), (4, 10)]),
        ('{"steps": [\n "F0.a",\n "F0.L3",\n "F0.b",  "x"]}', [(3, 8), (4, 12)]),
        ('{"steps": ["F0.\\u0041 "]}', [(1, 12)]),
        ('{"steps": [], "kind": "pair"}', [(1, 23)]),
        ('{"steps": ["' + "F" * 201 + '"]}', [(1, 12)]),
        ("[" * 100_000, [(1, 1)]),
        ('{"steps": ' + "9" * 5000 + "}", [(1, 1)]),
    ],
)
def test_faults(text: str, places: list[tuple[int, int]]) -> None:
    """No JSON, not this model, no step, the wrong kind: one error with every place."""
    with pytest.raises(ScheduleParseError) as caught:
        Schedule.from_json(text)
    assert [(place.line, place.column) for place in caught.value.places] == places


@settings(deadline=None)
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(st.sampled_from(["steps", "kind", "version", "format", "x"]), inner, max_size=4)
        ),
        max_leaves=8,
    ),
    st.none() | st.integers(0, 3),
)
def test_any_json_is_read_or_located(value: object, indent: int | None) -> None:
    """Whatever well-formed JSON comes, it is a schedule or an error with places inside the text."""
    text = json.dumps(value, indent=indent)
    try:
        Schedule.from_json(text)
    except ScheduleParseError as error:
        lines = text.split("\n")
        assert error.places
        for place in error.places:
            assert 1 <= place.column <= len(lines[place.line - 1]) + 1


def test_size_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file beyond the limit is refused unread."""
    monkeypatch.setattr("layernodes.plan.text.MAX_CHARACTERS", 10)
    with pytest.raises(ScheduleParseError, match="at most 10 characters"):
        schedule_json.load('{"steps": []}', kind=schedule_json.Kind.SCHEDULE)


def test_many_bad_steps_take_linear_time() -> None:
    """20,000 bad steps on 20,000 lines are each located."""
    text = json.dumps({"steps": ["F0.L3"] * 20_000}, indent=0)
    with pytest.raises(ScheduleParseError) as caught:
        Schedule.from_json(text)
    assert len(caught.value.places) == 20_000
    assert caught.value.places[-1].line == 20_002
