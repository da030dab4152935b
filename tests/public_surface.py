"""The public surface as text: every public name, its parameters, its public methods and theirs.

``python -m tests.public_surface`` writes ``tests/public_surface.txt`` anew.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from types import ModuleType

from pydantic import BaseModel

import layernodes
import layernodes.megatron
import layernodes.pipelining
from layernodes import testing

FILE = Path(__file__).with_suffix(".txt")


def surface() -> str:
    """One line a name, in alphabetical order."""
    lines = [line for name in layernodes.__all__ for line in _lines(name, getattr(layernodes, name))]
    lines += [line for name in testing.__all__ for line in _lines(f"testing.{name}", getattr(testing, name))]
    lines += _lines("megatron.schedule", layernodes.megatron.schedule)
    for name in layernodes.pipelining.__all__:
        lines += _lines(f"pipelining.{name}", getattr(layernodes.pipelining, name))
    return "\n".join(sorted(lines)) + "\n"


def _lines(name: str, value: object) -> Iterator[str]:
    if isinstance(value, ModuleType):
        for inner, function in vars(value).items():
            if not inner.startswith("_") and getattr(function, "__module__", None) == value.__name__:
                yield from _lines(f"{name}.{inner}", function)
    elif isinstance(value, type) and issubclass(value, Enum):
        yield f"{name}: {', '.join(f'{member.name}={member.value}' for member in value)}"
    elif isinstance(value, type):
        yield f"{name}{_parameters(value)}"
        own = {key: v for base in reversed(value.__mro__) if _is_ours(base) for key, v in vars(base).items()}
        for inner, member in own.items():
            if inner.startswith("_"):
                continue
            if isinstance(member, staticmethod | classmethod):
                yield f"{name}.{inner}{_parameters(member.__func__)}"
            elif inspect.isfunction(member):
                yield f"{name}.{inner}{_parameters(member)}"
            elif isinstance(member, property):
                yield f"{name}.{inner}"
    elif callable(value):
        yield f"{name}{_parameters(value)}"
    else:
        yield name


def _is_ours(base: type) -> bool:
    return base.__module__.partition(".")[0] == "layernodes"


def _parameters(value: object) -> str:
    if isinstance(value, type) and issubclass(value, BaseModel):
        return f"({', '.join(value.model_fields)})"
    try:
        parameters = inspect.signature(value).parameters.values()  # type: ignore[arg-type]
    except ValueError:
        return ""
    return f"({', '.join(_spelling(p) for p in parameters if p.name not in ('self', 'cls'))})"


def _spelling(parameter: inspect.Parameter) -> str:
    star = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
    is_optional = parameter.default is not parameter.empty
    mark = "=" if is_optional else ""
    return f"{star}{parameter.name}{mark}"


if __name__ == "__main__":
    FILE.write_text(surface())
