"""The text form of schedules."""

from __future__ import annotations

import pytest

from layernodes.errors import ScheduleParseError
from layernodes.plan import text as text_module
from layernodes.plan.text import Lines, decode, parse_steps, print_steps


def test_blanks_lines_and_comments() -> None:
    """Blanks, tabs and new lines of both kinds separate; # runs to the end of the line, inside a word too."""
    text = "# head F9.nothing\nF0.pre_process\tF0.L0.mlp  # tail\r\n\r\n  F0.L1.mlp#near\n#\n B0.L1.mlp"
    assert print_steps(parse_steps(text)).split() == ["F0.pre_process", "F0.L0.mlp", "F0.L1.mlp", "B0.L1.mlp"]
    assert parse_steps("") == parse_steps(" \n# nothing\n") == ()


def test_every_bad_place_is_listed() -> None:
    """One error lists all places, each with line and column of the character at fault."""
    with pytest.raises(ScheduleParseError) as caught:
        parse_steps("F0.L0.mlp oops\nF0.L1.mlp\n\tF0.L2.mlp; F0\n")
    error = caught.value
    assert [(place.line, place.column, place.found) for place in error.places] == [
        (1, 11, "oops"),
        (3, 11, "F0.L2.mlp;"),
        (3, 15, "F0"),
    ]
    assert (error.line, error.column, error.expected) == (1, 11, "a phase: F, B or W")
    assert [violation.rule for violation in error.violations] == ["syntax"] * 3
    assert "line 3, column 15: found 'F0'" in str(error)


def test_very_many_bad_places() -> None:
    """All are in .places; the text stays short."""
    with pytest.raises(ScheduleParseError) as caught:
        parse_steps("x " * 5000)
    assert len(caught.value.places) == 5000
    assert "and 4980 more" in str(caught.value)
    assert len(str(caught.value)) < 5000


def test_unusual_separators_are_no_blanks() -> None:
    """A no-break space or a form feed is part of a word, and refused."""
    for blank in ("\u00a0", "\f", "\u2028", ","):
        with pytest.raises(ScheduleParseError):
            parse_steps(f"F0.L0.mlp{blank}F0.L1.mlp")


def test_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A text beyond the limits is refused, not read."""
    monkeypatch.setattr(text_module, "MAX_STEPS", 2)
    with pytest.raises(ScheduleParseError, match="at most 2 steps"):
        parse_steps("F0.a F0.b F0.c")
    monkeypatch.setattr(text_module, "MAX_CHARACTERS", 5)
    with pytest.raises(ScheduleParseError, match="at most 5 characters"):
        parse_steps("F0.abc")


def test_decode() -> None:
    """UTF-8 with or without a byte order mark; other bytes are refused at their place."""
    assert decode(b"\xef\xbb\xbfF0.a") == "F0.a"
    with pytest.raises(ScheduleParseError) as caught:
        decode(b"F0.a\nF0.\xff")
    assert (caught.value.line, caught.value.column) == (2, 4)


def test_lines() -> None:
    """Offsets map to lines and columns from 1."""
    lines = Lines("ab\n\nc")
    assert [lines.locate(offset) for offset in range(6)] == [(1, 1), (1, 2), (1, 3), (2, 1), (3, 1), (3, 2)]
