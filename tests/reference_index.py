"""The index of the reference as text: every public name with its signature and what it does, page by page.

``python -m tests.reference_index`` writes ``docs/reference/index.md`` anew. The pages themselves show signatures only
where mkdocstrings renders them.
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterator
from enum import Enum
from functools import cached_property
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, Final

from pydantic import BaseModel

import layernodes

FOLDER: Final = Path(__file__).parents[1] / "docs" / "reference"
FILE: Final = FOLDER / "index.md"
_ENTRY: Final = re.compile(r"^::: (\S+)\n((?: +.*\n)*)", flags=re.MULTILINE)
_MADE_BY_THEIR_METHODS: Final = (layernodes.LayerPlan, layernodes.ChunkPlan, layernodes.ChunkRun)
_HEAD: Final = """# All names

Every public name with its signature, page by page; the pages say more of each, and have an example. Written by
`python -m tests.reference_index`.
"""


def index() -> str:
    """The text of the page."""
    parts = [_HEAD]
    for page in sorted(FOLDER.glob("*.md")):
        text = page.read_text()
        entries = [(path, "inherited_members: true" in options) for path, options in _ENTRY.findall(text)]
        if entries:
            title = text.partition("\n")[0].removeprefix("# ")
            parts += [f"## [{title}]({page.name})\n", *("\n".join(_lines(*entry)) + "\n" for entry in entries)]
    return "\n".join(parts)


def _lines(path: str, with_inherited: bool) -> Iterator[str]:
    home, _, name = path.rpartition(".")
    module = importlib.import_module(home)
    value = getattr(module, name) if hasattr(module, name) else importlib.import_module(path)
    yield _line(name, value)
    for inner, member in _members(value, with_inherited):
        yield "    " + _line(f"{name}.{inner}", member)


def _members(value: Any, with_inherited: bool) -> Iterator[tuple[str, Any]]:
    """What a class or a module shows: methods and properties, and a module's own functions."""
    owners = [value] if isinstance(value, ModuleType | type) and not _is_enum(value) else []
    if with_inherited and isinstance(value, type):
        owners = [base for base in reversed(value.__mro__) if base.__module__.startswith("layernodes")]
    for name, member in {name: member for owner in owners for name, member in vars(owner).items()}.items():
        function = getattr(member, "__func__", member)
        is_own = not isinstance(value, ModuleType) or getattr(function, "__module__", None) == value.__name__
        if not name.startswith("_") and is_own and isinstance(function, FunctionType | property | cached_property):
            yield name, function


def _line(name: str, value: Any) -> str:
    summary = (inspect.getdoc(value) or "").partition("\n\n")[0].replace("\n", " ")
    return f"- `{name}{_signature(value)}`: {summary}"


def _signature(value: Any) -> str:
    if _is_enum(value) or value in _MADE_BY_THEIR_METHODS or not callable(value):
        return ""
    if isinstance(value, type) and issubclass(value, BaseModel):
        fields = value.model_fields.items()
        return f"(*, {', '.join(name if field.is_required() else f'{name}=...' for name, field in fields)})"
    try:
        signature = inspect.signature(value)
    except ValueError:  # an exception without a constructor of its own
        return ""
    kept = [_spelt(parameter) for name, parameter in signature.parameters.items() if name not in ("self", "cls")]
    shown = str(signature.replace(parameters=kept)).replace("'", "").replace('"', "'")
    return shown.removesuffix(" -> None") if isinstance(value, type) else shown


def _spelt(parameter: inspect.Parameter) -> inspect.Parameter:
    """With a default that reads as in code, or as dots."""
    default = parameter.default
    if default is parameter.empty:
        return parameter
    if isinstance(default, str):
        text = f'"{default}"'
    elif isinstance(default, tuple) and all(isinstance(item, str) for item in default):
        text = "(" + ", ".join(f'"{item}"' for item in default) + ")"
    else:
        text = str(default) if isinstance(default, int | float | Enum | None) else "..."
    return parameter.replace(default=_Text(text))


class _Text:
    def __init__(self, text: str) -> None:
        self._text = text

    def __repr__(self) -> str:
        return self._text


def _is_enum(value: Any) -> bool:
    return isinstance(value, type) and issubclass(value, Enum)


if __name__ == "__main__":
    FILE.write_text(index())
