"""The base of the pydantic models that users write: costs and what they are made of.

Contract: whatever does not fit is one ``CostError`` that lists every fault by its place, whether the model was called,
or read from JSON, or stands within another model.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final  # Any: what a user gives is anything, until the model has checked it

from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError
from pydantic_core import PydanticCustomError

from layernodes.errors import CostError
from layernodes.plan.arguments import check_argument
from layernodes.plan.closest import closest


def _refuse_other_than_number(value: object) -> object:
    if isinstance(value, str | bytes | bool):
        raise PydanticCustomError("number_type", "Input should be a valid number")
    return value


NUMBER: Final = BeforeValidator(_refuse_other_than_number)
"""For fields that take a number: a text of digits, or a bool, is none."""


class StrictModel(BaseModel):
    """A frozen model that takes its own fields alone.

    Raises:
        CostError: a value of another type or size than its field takes, or an unknown field; names each.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    def __init__(self, /, *values: Any, **fields: Any) -> None:
        """Takes ``fields`` by name; ``values`` without one are refused."""
        name = type(self).__name__
        if values:
            raise CostError(f"{name}({values[0]!r:.40}): give each field by name: {', '.join(type(self).model_fields)}")
        try:
            super().__init__(**fields)
        except ValidationError as error:
            faults = tuple(find_faults(error, type(self)))
            raise CostError(f"{name} does not fit: " + "\n  ".join(faults), faults=faults) from None


def find_faults(error: ValidationError, model: type[BaseModel]) -> Iterator[str]:
    """Each fault that pydantic found in a model, as its place, what was found there and what was wanted."""
    for fault in error.errors(include_url=False):
        place = ".".join(map(str, fault["loc"]))
        inner = fault.get("ctx", {}).get("error")
        if isinstance(inner, CostError) and inner.faults:  # of a model within this one
            yield from (f"{place}.{text}" if place else text for text in inner.faults)
        elif fault["type"] == "missing":
            yield f"{place} is missing; give it"
        elif fault["type"] == "extra_forbidden":
            names = tuple(model.model_fields)
            meant = closest(str(fault["loc"][-1]), names)
            hint = f"did you mean {meant}?" if meant else f"take it out; the fields are {', '.join(names)}"
            yield f"{place} is no field of {model.__name__}; {hint}"
        elif fault["type"] == "json_invalid":
            yield f"it is no JSON ({fault['msg'].removeprefix('Invalid JSON: ')})"
        else:
            wanted = fault["msg"].removeprefix("Value error, ").removeprefix("Input should be ")
            is_own = fault["type"] == "value_error"
            yield (
                f"{place or 'it'}: {wanted}" if is_own else f"{place or 'it'} is {fault['input']!r:.40}; give {wanted}"
            )


def check_amounts(**amounts: float) -> None:
    """Raise CostError, or ArgumentError, where one of these arguments is no finite number of 0 or more."""
    for name, amount in amounts.items():
        check_argument(name, amount, int, float)
        if not 0 <= amount < float("inf"):
            raise CostError(f"{name}={amount}; give a finite number, 0 or more")
