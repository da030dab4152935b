"""Recognises what a file holds, so that one of another kind than wanted is refused by its name and not by its fields.

Contract: looks at the outermost fields of JSON, or at the first word of text; never raises. Whatever is not recognised
is for the reader of the wanted kind to judge.
"""

from __future__ import annotations

import json
from typing import Final, NamedTuple, final

from layernodes.plan.step import Step


@final
class FileKind(NamedTuple):
    """What a file holds.

    Attributes:
        name: in words. written_by: what writes such files. taken_by: what reads them.
    """

    name: str
    written_by: str
    taken_by: str

    def instead_of(self, wanted: str) -> str:
        """What to say where another kind is wanted."""
        return f"{wanted}; {self.written_by} wrote this, and {self.taken_by}"


SCHEDULE_ENDINGS: Final = (".txt", ".json")
"""How the name of a file with a schedule ends."""
PICTURE_ENDINGS: Final = (".png", ".svg", ".pdf")
"""How the name of a picture ends."""

_NOBODY: Final = "it is for people and programs to read: no command takes it"
TRACE: Final = FileKind(
    "a trace",
    "'layernodes run --trace', 'layernodes trace' or Timeline.to_perfetto",
    "'layernodes simulate', 'plot', 'explain' and Timeline.from_perfetto take it",
)
COSTS: Final = FileKind("a cost model", "'layernodes profile' or CostModel.save", "--costs and CostModel.load take it")
SCHEDULE: Final = FileKind(
    "a schedule as JSON", "'layernodes optimize -o' or Schedule.save", "commands take it as SCHEDULE, in a .json file"
)
PAIR: Final = FileKind(
    "a pair as JSON", "'layernodes optimize --pair -o' or PairSchedule.save", "commands take it with --pair, as .json"
)
STEPS: Final = FileKind(
    "steps as text", "'layernodes show --steps' or Schedule.save", "commands take it as SCHEDULE, in a .txt file"
)
_REPORTS: Final = (
    (("verdict",), "run --json' or 'layernodes demo --json", _NOBODY),
    (("candidates", "steps"), "optimize --json", "-o FILE of that command writes the schedule alone"),
    (("causes", "helps"), "explain --json", _NOBODY),
    (("valid", "violations"), "check --json", _NOBODY),
    (("makespan", "num_steps"), "simulate --json", "'layernodes trace' writes the timeline itself"),
    (("packages", "problems"), "doctor --json", _NOBODY),
)


def kind_of_value(value: object) -> FileKind | None:
    """The kind of a JSON value, or None."""
    if not isinstance(value, dict):
        return None
    if "traceEvents" in value:
        return TRACE
    if value.get("format") == "layernodes.schedule":
        return PAIR if value.get("kind") == "pair" else SCHEDULE
    if "kinds" in value:
        return COSTS
    if {"layer", "nodes", "notes"} <= value.keys():
        return FileKind("a layer's description", "LayerPlan.describe", _NOBODY)
    for fields, command, taken_by in _REPORTS:
        if value.keys() >= set(fields):
            return FileKind("a report", f"'layernodes {command}'", taken_by)
    return None


def kind_of_text(text: str) -> FileKind | None:
    """The kind of a file's text, or None."""
    words = text.partition("\n")[0].split(maxsplit=1)
    if words and Step.match(words[0]) is not None:
        return STEPS
    try:
        return kind_of_value(json.loads(text)) if text.lstrip()[:1] == "{" else None
    except (ValueError, RecursionError):
        return None


def found_instead(text: str, wanted: FileKind) -> tuple[str, ...]:
    """The fault of a text of another kind than wanted, in words; none where the kind is right, or not recognised."""
    found = kind_of_text(text)
    if found is None or found is wanted:
        return ()
    return (f"found {found.name!r}, expected {found.instead_of(wanted.name)}",)
