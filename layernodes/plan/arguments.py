"""Refuses arguments of another type or value than wanted, in words: what was found, what was wanted, and where to get
it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import StrEnum
from typing import Final, NoReturn

from layernodes.errors import ArgumentError, OptionError

_ADVICE: Final[Mapping[str, str]] = {
    "ChunkPlan": "build one with ChunkPlan.build(model), or ChunkPlan.of([LayerPlan.build(layer), ...])",
    "ChunkRun": "open one with chunk.open(batch)",
    "ChunkShape": "take chunk.shape, or ChunkShape.of(['moe', 'dense'])",
    "CostModel": "take CostModel.load(path), profile(chunk, batch) or preset(name).costs()",
    "ExtraSlot": "write ExtraSlot(name, after=Slot.MLP)",
    "Interval": "take result.timeline of a run, or simulate(schedule, costs)",
    "LayerPlan": "build one with LayerPlan.build(layer)",
    "LayerHooks": "write LayerHooks(before_forward=function), or leave it out",
    "LayerRegistry": "write LayerRegistry().register(MyLayer, {Slot.MLP: MyNode}), or leave it out",
    "LayerShape": "take LayerShape.of('moe'), or let ChunkShape.of(['moe', 'dense']) make them",
    "Mapping": "give a dict",
    "Module": "give a torch.nn.Module, or several in a list",
    "PairSchedule": "take a built-in of layernodes.pairs, PairSchedule(steps), PairSchedule.parse(text) or .load(path)",
    "PathLike": "give a path as text or pathlib.Path",
    "Schedule": "take a built-in of layernodes.schedules, Schedule(steps), Schedule.parse(text) or Schedule.load(path)",
    "Sequence": "give a list",
    "SlotShape": "write SlotShape(name='mlp'), or let LayerShape.of('moe') make them",
    "Step": "write Step.parse('F0.L3.mlp'), or take one of a schedule",
    "Timeline": "take result.timeline of a run, simulate(schedule, costs) or Timeline.from_perfetto(path)",
    "float": "give a number",
    "int": "give a whole number",
    "str": "give text; a file is read with load(path)",
}


def check_argument(name: str, value: object, *kinds: type, advice: str = "") -> None:
    """Raise ArgumentError where ``value``, the argument of this name, is of none of ``kinds``.

    Args:
        name, value: the argument.
        kinds: the types that are wanted.
        advice: where to get one; empty: what is usual for the types.
    """
    if not isinstance(value, kinds):
        wanted = [kind.__name__ for kind in kinds]
        advice = advice or "; or ".join(dict.fromkeys(_ADVICE[kind] for kind in wanted if kind in _ADVICE))
        names = " or ".join("None" if name == "NoneType" else name for name in wanted)
        raise ArgumentError(f"{name} is {_found(value)}, where {names} is wanted" + (f"; {advice}" if advice else ""))


def check_items(name: str, values: object, kind: type, *, advice: str = "") -> None:
    """Raise ArgumentError where ``values``, the argument of this name, is no list or tuple of one ``kind``.

    Args:
        name, values: the argument.
        kind: what each of its items must be.
        advice: where to get one; empty: what is usual for the type.
    """
    if not isinstance(values, Iterable) or isinstance(values, str | bytes):
        advice = advice or _ADVICE.get(kind.__name__, "")
        raise ArgumentError(
            f"{name} is {_found(values)}, where a list of {kind.__name__} is wanted" + (f"; {advice}" if advice else "")
        )
    for number, value in enumerate(values):
        if not isinstance(value, kind):  # its place is spelled out for a wrong one alone: there may be many
            check_argument(f"{name}[{number}]", value, kind, advice=advice)


def refuse_option(name: str, value: object, kinds: type[StrEnum]) -> NoReturn:
    """Raise OptionError: ``value`` is none of the ``kinds`` that the option of this name may have."""
    raise OptionError(f"unknown {name}={value!r}; choose one of {', '.join(map(repr, map(str, kinds)))}")


def _found(value: object) -> str:
    if value is None:
        return "None"
    if isinstance(value, type):
        return f"the class {value.__name__}"[:60]
    return repr(value)[:60] if isinstance(value, int | float | str) else f"of type {type(value).__name__}"[:60]
