"""The text form of schedules: steps separated by blanks or new lines; ``#`` starts a comment.

Contract: lexical only. Every word either is a step or becomes one place of a single error; whether the steps make
sense for a model is for ``validate``.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable
from typing import NoReturn

from layernodes.errors import ParsePlace, ScheduleParseError
from layernodes.plan.arguments import check_argument
from layernodes.plan.file_kinds import STEPS, FileKind, kind_of_text
from layernodes.plan.step import Step, explain_step

MAX_STEPS = 2_000_000
"""Longest schedule that is read from text or JSON, in steps."""

MAX_CHARACTERS = 128_000_000
"""Longest text or JSON that is read, in characters."""

_WORD = re.compile(r"[^ \t\r\n]+")


def parse_steps(text: str) -> tuple[Step, ...]:
    """Read steps from text.

    Raises:
        ScheduleParseError: some words are no steps (all are listed), or the text is beyond the limits.
    """
    check_argument("text", text, str)
    check_size(text)
    steps: list[Step] = []
    bad: list[ParsePlace] = []
    for number, line in enumerate(text.split("\n"), start=1):
        for word in _WORD.finditer(line.partition("#")[0]):
            step = Step.match(word[0])
            if step is not None:
                steps.append(step)
            else:
                bad.append(place_of(word[0], line=number, column=word.start() + 1))
    if bad:
        found = kind_of_text(text)
        if found is not None and found is not STEPS:
            refuse_kind(found, "steps as text")
        raise ScheduleParseError.at(bad)
    check_count(len(steps))
    return tuple(steps)


def print_steps(steps: Iterable[Step]) -> str:
    """The text of steps, one a line."""
    return "\n".join(map(str, steps))


def place_of(word: str, *, line: int, column: int) -> ParsePlace:
    """The bad place inside a word that is no step and starts at this line and column."""
    offset, expected = explain_step(word)
    return ParsePlace(line=line, column=column + offset, found=word, expected=expected)


def decode(data: bytes) -> str:
    """The text of a UTF-8 file, with or without a byte order mark.

    Raises:
        ScheduleParseError: the bytes are no UTF-8.
    """
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        before = data[: error.start].decode("utf-8-sig")
        line, column = Lines(before).locate(len(before))
        place = ParsePlace(line=line, column=column, found=repr(data[error.start : error.end]), expected="UTF-8 text")
    raise ScheduleParseError.at([place])


class Lines:
    """Finds line and column of offsets into a text; reads the text once."""

    def __init__(self, text: str) -> None:
        self._starts = [0, *(found.end() for found in re.finditer("\n", text))]

    def locate(self, offset: int) -> tuple[int, int]:
        """Line and column, from 1."""
        line = bisect_right(self._starts, offset)
        return line, offset - self._starts[line - 1] + 1


def refuse_kind(found: FileKind, wanted: str) -> NoReturn:
    """Refuse a file of another kind than wanted, as a whole.

    Raises:
        ScheduleParseError: always.
    """
    raise ScheduleParseError.at([ParsePlace(line=1, column=1, found=found.name, expected=found.instead_of(wanted))])


def check_size(text: str) -> None:
    """Refuse a text that is too long to be read.

    Raises:
        ScheduleParseError: it has more than ``MAX_CHARACTERS`` characters.
    """
    if len(text) > MAX_CHARACTERS:
        found, expected = f"{len(text)} characters", f"at most {MAX_CHARACTERS} characters"
        raise ScheduleParseError.at([ParsePlace(line=1, column=1, found=found, expected=expected)])


def check_count(num_steps: int) -> None:
    """Refuse a schedule that is too long.

    Raises:
        ScheduleParseError: it has more than ``MAX_STEPS`` steps.
    """
    if num_steps > MAX_STEPS:
        found, expected = f"{num_steps} steps", f"at most {MAX_STEPS} steps"
        raise ScheduleParseError.at([ParsePlace(line=1, column=1, found=found, expected=expected)])
