"""Every public function and constructor that takes data, called with wrong values: typed errors, and no other."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from types import GeneratorType
from typing import Any, Final

import pytest

import layernodes
from layernodes import (
    ArgumentError,
    ChunkShape,
    CostError,
    CostModel,
    Interval,
    LayerNodesError,
    LayerShape,
    PairSchedule,
    PlanError,
    Schedule,
    ScheduleError,
    SlotCost,
    SlotShape,
    Step,
    StreamType,
    Timeline,
    pairs,
    preset,
    schedules,
)
from layernodes.plan.hardware import H100

_SHAPE: Final = ChunkShape.of(["moe"], wgrad=True)
_SCHEDULE: Final = schedules.serial(_SHAPE, 2)
_COSTS: Final = CostModel.simple(computation=1.0, communication=1.0)
_TIMELINE: Final = layernodes.simulate(_SCHEDULE, _COSTS)
_STEP: Final = _SCHEDULE[0]
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    **{name: getattr(layernodes, name) for name in layernodes.__all__ if name.endswith("_steps")},
    **{f"schedules.{name}": getattr(schedules, name) for name in (*schedules.BUILT_IN, "deferred")},
    **{f"pairs.{name}": getattr(pairs, name) for name in ("serial", "combined_1f1b", "forward_forward", "deferred")},
    "validate": layernodes.validate,
    "validate_pair": layernodes.validate_pair,
    "simulate": layernodes.simulate,
    "optimize": layernodes.optimize,
    "optimize_pair": layernodes.optimize_pair,
    "explain": layernodes.explain,
    "preset": preset,
    "Preset.shape": preset("mixtral-8x7b").shape,
    "Preset.costs": preset("mixtral-8x7b").costs,
    "interleave": layernodes.interleave,
    "Hardware": type(H100),
    "Preset": type(preset("mixtral-8x7b")),
}
_VALUES: Final = (
    _SCHEDULE,
    pairs.serial(_SHAPE, _SHAPE),
    _TIMELINE,
    _SHAPE,
    _SHAPE.layers[0],
    _COSTS,
    _STEP,
    SlotCost(),
)
_CLASSES: Final = (
    *(Schedule, PairSchedule, Timeline, ChunkShape, LayerShape, SlotShape, CostModel, SlotCost, Step),
    *(layernodes.ExtraSlot, layernodes.Measurement, layernodes.SlotSpread),
)
_GOOD: Final[dict[str, Any]] = {
    **{"shape": _SHAPE, "forward_shape": _SHAPE, "backward_shape": _SHAPE, "schedule": _SCHEDULE, "costs": _COSTS},
    **{"timeline": _TIMELINE, "num_microbatches": 2, "microbatch": 0, "step": _STEP, "mtp": 0, "computation": 1.0},
    **{"communication": 1.0, "name": "own", "kind": "moe", "slot": "mlp", "layer": 0, "phase": "F", "after": "mlp"},
    **{"other": _TIMELINE, "deferred": True, "layers": ["moe"], "steps": (), "slots": (), "kinds": {}, "intervals": ()},
}
_WRONG: Final[tuple[Any, ...]] = (None, 3, -1, "nothing", [1], ["x"], {}, {"a": 1}, object(), Schedule, 1.5, b"x")
_FLAGS: Final = {"bool"}  # whatever has a truth value may be given for these


def _calls() -> Iterator[tuple[str, Callable[..., Any]]]:
    yield from _FUNCTIONS.items()
    for owner in _CLASSES:
        yield owner.__name__, owner
        for name, member in vars(owner).items():
            if not name.startswith("_") and isinstance(member, classmethod):
                yield f"{owner.__name__}.{name}", getattr(owner, name)
    for value in _VALUES:
        for base in type(value).__mro__:
            for name, member in vars(base).items():
                if base.__module__.startswith("layernodes") and name[0] != "_" and inspect.isfunction(member):
                    yield f"{type(value).__name__}().{name}", getattr(value, name)


def _attempts(function: Callable[..., Any]) -> Iterator[dict[str, Any]]:
    """For each parameter, each wrong value, with good ones for those that must be given besides."""
    parameters = inspect.signature(function).parameters.values()
    for wrong in parameters:
        if wrong.annotation in _FLAGS:
            continue
        others = {
            other.name: _GOOD.get(other.name, "x")
            for other in parameters
            if other is not wrong and other.default is other.empty and other.kind is not other.VAR_POSITIONAL
        }
        for value in _WRONG:
            yield others | {wrong.name: value}


def _call(function: Callable[..., Any], given: dict[str, Any]) -> None:
    starred = [p.name for p in inspect.signature(function).parameters.values() if p.kind is p.VAR_POSITIONAL]
    positional = [given.pop(name) for name in starred if name in given]
    result = function(*positional, **given)
    if isinstance(result, GeneratorType):
        list(result)


@pytest.mark.parametrize(("name", "function"), list(_calls()), ids=lambda v: v if isinstance(v, str) else "")
def test_errors_are_typed(
    name: str, function: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each wrong value in the place of each argument is taken, or refused with an error of layernodes."""
    monkeypatch.chdir(tmp_path)
    raw = []
    for given in _attempts(function):
        try:
            _call(function, dict(given))
        except (LayerNodesError, OSError):
            pass
        except Exception as error:
            raw.append(f"{given}: {type(error).__name__}: {error}")
    assert raw == []


_TEXTS: Final[list[tuple[Callable[..., Any], dict[str, Any], type[LayerNodesError], str]]] = [
    (Schedule, {"steps": 3}, ArgumentError, "steps is 3, where a list of Step is wanted; give a list of Step, or use"),
    (Step.parse, {"text": 3}, ArgumentError, "text is 3, where str is wanted; give a step's text, such as 'F0.L3.mlp'"),
    (Timeline, {"intervals": [1]}, ArgumentError, "intervals[0] is 1, where Interval is wanted; take result.timeline"),
    (preset, {"name": []}, ArgumentError, "name is of type list, where str is wanted; give one of deepseek-v3, qwen3-"),
    (
        pairs.serial,
        {"forward_shape": "moe", "backward_shape": None},
        ArgumentError,
        "forward_shape is 'moe', where ChunkShape or None is wanted; take chunk.shape",
    ),
    (ChunkShape, {"layers": ["moe"]}, ArgumentError, "layers[0] is 'moe', where LayerShape is wanted; take LayerShape"),
    (
        SlotShape,
        {"name": "x", "stream": "comm"},
        ArgumentError,
        "stream is 'comm', where StreamType is wanted; give S",
    ),
    (SlotCost, {"F": -1}, CostError, "SlotCost does not fit: F is -1; give greater than or equal to 0"),
    (SlotCost, {"G": 1}, CostError, "G is no field of SlotCost; take it out; the fields are F, B, W, activation_bytes"),
    (CostModel, {"kinds": {"moe": {"mlp": {"F": "x"}}}}, CostError, "kinds.moe.mlp.F is 'x'; give a valid number"),
    (CostModel, {"kinds": {"moe": {"mlp": 3}}}, CostError, "kinds.moe.mlp is 3; give a valid dictionary or instance"),
    (
        CostModel,
        {"kind": {}},
        CostError,
        "kinds is missing; give it\n  kind is no field of CostModel; did you mean ki",
    ),
    (
        CostModel.simple,
        {"computation": -1, "communication": 1},
        CostError,
        "computation=-1; give a finite number, 0 or",
    ),
    (schedules.serial, {"shape": _SHAPE, "num_microbatches": 0}, ScheduleError, "num_microbatches=0; give 1 or more"),
    (schedules.combined_1f1b, {"shape": _SHAPE, "num_microbatches": -1}, ScheduleError, "num_microbatches=-1; give 1"),
    (schedules.forward_only, {"shape": _SHAPE, "num_microbatches": 0}, ScheduleError, "num_microbatches=0; give 1 or"),
    (
        layernodes.optimize,
        {"shape": _SHAPE, "costs": _COSTS, "num_microbatches": 0},
        ScheduleError,
        "num_microbatches=0; give 1 or more",
    ),
    (preset("mixtral-8x7b").shape, {"num_layers": 0}, PlanError, "num_layers=0; give 1 or more, or None for the model"),
    (preset("mixtral-8x7b").shape, {"num_layers": -2}, PlanError, "num_layers=-2; give 1 or more"),
    (
        _TIMELINE.compare,
        {"other": _TIMELINE, "names": ("a",)},
        ArgumentError,
        "names has 1 names, where two are wanted",
    ),
]


@pytest.mark.parametrize(("function", "given", "kind", "text"), _TEXTS, ids=lambda v: v if isinstance(v, str) else "")
def test_texts_say_what_to_do(
    function: Callable[..., Any], given: dict[str, Any], kind: type[LayerNodesError], text: str
) -> None:
    """What was found, what was wanted, and what to change."""
    with pytest.raises(kind) as caught:
        function(**given)
    assert text in str(caught.value)


def test_faults_are_facts() -> None:
    """A cost model's error has each fault as an attribute; a value without its field's name is told too."""
    with pytest.raises(CostError) as caught:
        CostModel(kinds={"moe": {"mlp": {"F": -1, "X": 1}}}, hardware_queues=0)  # type: ignore[dict-item]
    assert caught.value.faults == (
        "kinds.moe.mlp.F is -1; give greater than or equal to 0",
        "kinds.moe.mlp.X is no field of SlotCost; take it out; the fields are F, B, W, activation_bytes, wgrad_bytes",
        "hardware_queues is 0; give greater than or equal to 1",
    )
    with pytest.raises(CostError, match=r"SlotCost\(3\): give each field by name: F, B, W, activation_bytes"):
        SlotCost(3)  # type: ignore[call-arg,misc]


def test_nothing_to_schedule_is_legal_where_a_part_is_empty() -> None:
    """A pipeline part without layers has schedules of its own, with ends or with none."""
    assert len(schedules.serial(ChunkShape.of([]), 1)) == 4
    assert len(schedules.serial(ChunkShape.of([], pre_process=False, post_process=False), 2)) == 0
    assert Timeline([Interval(_STEP, StreamType.COMPUTE, 0.0, 1.0)]).intervals[0].step == _STEP  # type: ignore[arg-type]
