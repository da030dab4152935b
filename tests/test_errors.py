"""Errors are values: they travel from one process to another with what they tell."""

from __future__ import annotations

import copy
import pickle

import pytest

from layernodes import (
    LayerNodesError,
    MissingExtraError,
    NodeStateError,
    Schedule,
    ScheduleError,
    ScheduleParseError,
    StepError,
    StreamOrderError,
    UnsupportedLayerError,
    Violation,
)


def _parse_error() -> ScheduleParseError:
    with pytest.raises(ScheduleParseError) as caught:
        Schedule.parse("F0.L0.mlp X1 F0")
    return caught.value


_VIOLATION = Violation(rule="order", step="F0.L0.mlp", position=1, other=None, message="m")
_ERRORS: dict[str, LayerNodesError] = {
    "state": NodeStateError("text"),
    "step": StepError("text", step="F0.L1.mlp", layer=1, microbatch=0, completed=["F0.L0.mlp"]),
    "layer": UnsupportedLayerError("text", field="layer", value=int),
    "schedule": ScheduleError("text", [_VIOLATION]),
    "parse": _parse_error(),
    "streams": StreamOrderError("text", rule="order", step="a", other=None, tensor="t"),
    "extra": MissingExtraError("text", extra="testing"),
}


@pytest.mark.parametrize("name", _ERRORS)
def test_pickled_and_copied_with_its_facts(name: str) -> None:
    """Type, text, attributes and notes; an exception's own way calls the constructor without the facts."""
    error = _ERRORS[name]
    error.add_note("a note")
    for found in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert type(found) is type(error)
        assert str(found) == str(error)
        assert vars(found) == vars(error)
