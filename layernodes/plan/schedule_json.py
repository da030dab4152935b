"""The JSON form of schedules, checked by a pydantic model; every fault is reported with line and column.

Contract: ``load(dump(steps, kind=k), kind=k) == steps``. Three kinds of fault - no JSON, not this model, a text that
is no step - all become one ``ScheduleParseError`` that lists every place::

    value = JSON of the text             else: the place where the reader stopped
    file = model of the value            else: for each fault, the offset of the value at its path
    step of each text in file.steps      else: for each fault, the offset of that text
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import replace
from enum import StrEnum
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictStr, StringConstraints, ValidationError

from layernodes.errors import ParsePlace, ScheduleParseError
from layernodes.plan.file_kinds import PAIR, SCHEDULE, STEPS, kind_of_text, kind_of_value
from layernodes.plan.step import Step
from layernodes.plan.text import MAX_STEPS, Lines, check_size, place_of, refuse_kind

_FORMAT: Final = "layernodes.schedule"
_BLANK = re.compile(r"[ \t\r\n]*")

Path = tuple[str | int, ...]


class Kind(StrEnum):
    """Which type of schedule a file holds."""

    SCHEDULE = "schedule"
    PAIR = "pair"


_KINDS: Final = {Kind.SCHEDULE: SCHEDULE, Kind.PAIR: PAIR}


class ScheduleFile(BaseModel):
    """What a JSON schedule file holds."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    format: Literal["layernodes.schedule"] = _FORMAT
    version: Literal[1] = 1
    kind: Kind = Kind.SCHEDULE
    steps: list[Annotated[StrictStr, StringConstraints(max_length=200)]] = Field(max_length=MAX_STEPS)


def dump(steps: Iterable[Step], *, kind: Kind) -> str:
    """JSON text of steps, one step a line."""
    return ScheduleFile(kind=kind, steps=list(map(str, steps))).model_dump_json(indent=1)


def load(text: str, *, kind: Kind) -> tuple[Step, ...]:
    """Read the steps of a schedule of one kind from JSON text.

    Raises:
        ScheduleParseError: see the contract above; also a schedule of the other kind, or a text beyond the limits.
    """
    check_size(text)
    value = _read(text)
    found = kind_of_value(value)
    if found is not None and found not in _KINDS.values():
        refuse_kind(found, _KINDS[kind].name)
    try:
        file = ScheduleFile.model_validate(value)
    except ValidationError as error:
        where = _Where(text)
        faults = error.errors(include_url=False, include_context=False)
        places = [where.place(fault["loc"], f"a schedule file ({fault['msg']})") for fault in faults]
        raise ScheduleParseError.at(sorted(places, key=lambda place: (place.line, place.column))) from None
    if file.kind is not kind:
        other = _KINDS[file.kind]
        place = _Where(text).place(("kind",), other.instead_of(_KINDS[kind].name))
        raise ScheduleParseError.at([replace(place, found=other.name)])
    steps = [Step.match(word) for word in file.steps]
    bad = [index for index, step in enumerate(steps) if step is None]
    if bad:
        where = _Where(text)
        raise ScheduleParseError.at([where.bad_step(index, file.steps[index]) for index in bad])
    return tuple(step for step in steps if step is not None)


def _read(text: str) -> Any:  # a JSON value; the model checks its type
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        if kind_of_text(text) is STEPS:
            refuse_kind(STEPS, "a schedule as JSON")
        found = text[error.pos : error.pos + 20] or "the end"
        place = ParsePlace(line=error.lineno, column=error.colno, found=found, expected=f"JSON ({error.msg})")
    except RecursionError:
        place = ParsePlace(line=1, column=1, found="deeply nested JSON", expected="a list of steps")
    except ValueError:  # a number with more digits than Python converts
        place = ParsePlace(line=1, column=1, found="a very long number", expected="a list of steps")
    raise ScheduleParseError.at([place]) from None


class _Where:
    """Finds the values of a well-formed JSON text."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._lines = Lines(text)
        self._offsets = _offsets(text)

    def place(self, path: Path, expected: str) -> ParsePlace:
        """The bad place for the value at a path, or for the nearest value around it that is there."""
        found = ".".join(map(str, path)) or "the file"
        while path not in self._offsets:
            path = path[:-1]
        line, column = self._lines.locate(self._offsets[path])
        return ParsePlace(line=line, column=column, found=found, expected=expected)

    def bad_step(self, index: int, word: str) -> ParsePlace:
        """The bad place inside the text of a step that is none."""
        offset = self._offsets["steps", index]
        line, column = self._lines.locate(offset)
        inside = place_of(word, line=line, column=column + 1)
        if self._text.startswith(f'"{word}"', offset):
            return inside
        return ParsePlace(line=line, column=column, found=word, expected=inside.expected)  # escapes shift columns


def _offsets(text: str) -> dict[Path, int]:
    """Where the values of a well-formed JSON text start: the whole, each member, each item of a member's list."""
    decoder = json.JSONDecoder()

    def skip(at: int) -> int:
        blank = _BLANK.match(text, at)
        return at if blank is None else blank.end()

    def items(at: int, path: Path) -> int:
        """Record the items of the list or members of the object that starts at ``at``; return where it ends."""
        closing, named = ("]", False) if text[at] == "[" else ("}", True)
        at = skip(at + 1)
        index = 0
        while text[at] != closing:
            key: str | int = index
            if named:
                key, at = decoder.raw_decode(text, at)
                at = skip(skip(at) + 1)
            offsets[*path, key] = at
            if not path and text[at] == "[":
                at = items(at, (key,))
            else:
                _, at = decoder.raw_decode(text, at)
            at = skip(at)
            if text[at] == ",":
                at = skip(at + 1)
            index += 1
        return at + 1

    start = skip(0)
    offsets: dict[Path, int] = {(): start}
    if text[start] == "{":
        items(start, ())
    return offsets
