"""Refuses arguments of another type or value than wanted, in words: what was found, what was wanted, and where to get
it."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Final

from layernodes.errors import ArgumentError, OptionError

_ADVICE: Final[Mapping[str, str]] = {
    "ChunkPlan": "build one with ChunkPlan.build(model), or ChunkPlan.of([LayerPlan.build(layer), ...])",
    "ChunkRun": "open one with chunk.open(batch)",
    "ChunkShape": "take chunk.shape, or ChunkShape.of(['moe', 'dense'])",
    "CostModel": "take CostModel.load(path), profile(chunk, batch) or preset(name).costs()",
    "LayerPlan": "build one with LayerPlan.build(layer)",
    "Mapping": "give a dict",
    "Module": "give a torch.nn.Module, or several in a list",
    "PairSchedule": "take a built-in of layernodes.pairs, PairSchedule(steps), PairSchedule.parse(text) or .load(path)",
    "PathLike": "give a path as text or pathlib.Path",
    "Schedule": "take a built-in of layernodes.schedules, Schedule(steps), Schedule.parse(text) or Schedule.load(path)",
    "Sequence": "give a list",
    "Step": "give each sequence of steps as an argument of its own: interleave(one, another)",
    "Timeline": "take result.timeline of a run, simulate(schedule, costs) or Timeline.from_perfetto(path)",
    "int": "give a whole number",
    "str": "give text; a file is read with load(path)",
}


def check_argument(name: str, value: object, *kinds: type) -> None:
    """Raise ArgumentError where ``value``, the argument of this name, is of none of ``kinds``."""
    if not isinstance(value, kinds):
        found = "None" if value is None else f"the class {value.__name__}" if isinstance(value, type) else repr(value)
        if not isinstance(value, type | int | str | None):
            found = f"of type {type(value).__name__}"
        wanted = [kind.__name__ for kind in kinds]
        raise ArgumentError(
            f"{name} is {found[:60]}, where {' or '.join(wanted)} is wanted; "
            + "; or ".join(dict.fromkeys(_ADVICE[kind] for kind in wanted if kind in _ADVICE))
        )


def option_of[E: StrEnum](kinds: type[E], name: str, value: str) -> E:
    """The member of ``kinds`` that the option of this name has as its value; OptionError where there is none such."""
    if value not in tuple(kinds):
        raise OptionError(f"unknown {name}={value!r}; choose one of {', '.join(map(repr, map(str, kinds)))}")
    return kinds(value)
