"""The reference has every public name, each with an example beside it, and the examples run."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import textwrap
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import pytest
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

import layernodes
import layernodes.pipelining
from layernodes import ScheduleNode, testing
from tests import reference_index

_FOLDER = Path(__file__).parents[1] / "docs"
_PAGES = sorted((_FOLDER / "reference").glob("*.md"))
_ENTRY = re.compile(r"^::: (\S+)\n(.*?)(?=^:::|\Z)", flags=re.DOTALL | re.MULTILINE)
_BLOCK = re.compile(r"^```python\n(.*?)^```", flags=re.DOTALL | re.MULTILINE)
_ENTRIES = {path: body for page in _PAGES for path, body in _ENTRY.findall(page.read_text())}
"""What stands below each name, up to the next one."""


def _value(path: str) -> Any:
    home, _, name = path.rpartition(".")
    module = importlib.import_module(home)
    return getattr(module, name) if hasattr(module, name) else importlib.import_module(path)


def test_every_public_name_is_there_once() -> None:
    """By the place where it is defined."""
    listed = [path for page in _PAGES for path, _ in _ENTRY.findall(page.read_text())]
    assert len(set(listed)) == len(listed)
    names = {path.rpartition(".")[2] for path in listed}
    assert names == {*layernodes.__all__, *testing.__all__, *layernodes.pipelining.__all__, "schedule"}


@pytest.mark.parametrize("path", _ENTRIES)
def test_name_has_an_example(path: str) -> None:
    """Python below the name uses it; of a module, each of its functions."""
    value, name = _value(path), path.rpartition(".")[2]
    code = "\n".join(_BLOCK.findall(_ENTRIES[path]))
    wanted = {name}
    if isinstance(value, ModuleType):
        wanted |= {inner for inner, its in vars(value).items() if getattr(its, "__module__", None) == value.__name__}
    missing = {name for name in wanted if not name.startswith("_") and not re.search(rf"\b{name}\b", code)}
    assert not missing


@pytest.mark.parametrize("path", _ENTRIES)
def test_name_is_documented(path: str) -> None:
    """It has a docstring, and so has each of its methods or functions; each names its parameters."""
    value = _value(path)
    parts = {path: value} | {f"{path}.{name}": member for name, member in _members(value)}
    assert [name for name, part in parts.items() if not inspect.getdoc(part)] == []
    silent = {name: _unnamed(part) for name, part in parts.items() if not isinstance(part, ModuleType | property)}
    assert {name: parameters for name, parameters in silent.items() if parameters} == {}


@pytest.mark.parametrize("path", _ENTRIES)
def test_errors_are_documented(path: str) -> None:
    """Each error that a function, a method or a constructor raises itself is named in its docstring."""
    value = _value(path)
    makers = ("__init__", "__post_init__", "__enter__", "__exit__")
    parts = {f"{path}.{name}": (member, member) for name, member in _members(value)}
    if isinstance(value, FunctionType):
        parts[path] = value, value
    elif isinstance(value, type):
        parts |= {f"{path}.{name}": (vars(value)[name], value) for name in makers if _is_ours(vars(value).get(name))}
    silent = {
        name: _raised(getattr(code, "fget", code)) - set(re.findall(r"\w+", inspect.getdoc(told) or ""))
        for name, (code, told) in parts.items()
    }
    assert {name: errors for name, errors in silent.items() if errors} == {}


def _is_ours(function: Any) -> bool:
    return inspect.isfunction(function) and function.__module__.startswith("layernodes")


def _raised(function: Any) -> set[str]:
    """Names of the errors in a function's ``raise`` statements; none of what is made, as dataclasses' are."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError):
        return set()
    raised = [node.exc for node in ast.walk(tree) if isinstance(node, ast.Raise) and node.exc is not None]
    names = [name.id for exc in raised for name in ast.walk(exc) if isinstance(name, ast.Name)]
    return {name for name in names if name.endswith("Error")}


def _members(value: Any) -> Iterator[tuple[str, Any]]:
    """What a class or a module itself defines and shows."""
    for name, member in vars(value).items() if isinstance(value, ModuleType | type) else ():
        function = getattr(member, "__func__", member)
        is_foreign = isinstance(value, ModuleType) and getattr(function, "__module__", None) != value.__name__
        if not name.startswith("_") and not is_foreign and isinstance(function, FunctionType | property):
            yield name, function


def _unnamed(part: Any) -> list[str]:
    """Parameters that a docstring does not name; those of constructors are attributes, or told in the class."""
    if isinstance(part, type) and (issubclass(part, Exception | Enum | ScheduleNode) or part in _MADE_BY_OTHERS):
        return []
    if not callable(part):
        return []
    text = f"{inspect.getdoc(part)} {part.__init__.__doc__ if isinstance(part, type) else ''}"
    names = [name for name in inspect.signature(part).parameters if name not in ("self", "cls") and name[0] != "_"]
    return [name for name in names if not re.search(rf"\b{name}\b", text)]


_MADE_BY_OTHERS = {
    *(layernodes.LayerPlan, layernodes.ChunkPlan, layernodes.ChunkRun),
    *(layernodes.NodeContext, layernodes.WgradHook),
}
"""Classes that one does not call: they are built by their own methods, or are protocols."""


@pytest.fixture(scope="module")
def given() -> Iterator[dict[str, Any]]:
    """The model of ``docs/examples/tiny_model.py``, in its world of one process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(_FOLDER / "examples")
        tiny = importlib.import_module("tiny_model")
        with tiny.one_process():
            tokens = tiny.TOKENS
            positions = tiny.torch.arange(8).expand(2, 8)
            batch = {"input_ids": tokens, "position_ids": positions, "attention_mask": None, "labels": tokens}
            yield {"model": tiny.make_model(), "batch": batch}


@pytest.mark.parametrize("name", ["plans", "megatron", "pipelining"])
def test_examples_run_on_a_model(name: str, given: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    """All blocks of the page together are one program; ``test_docs.py`` runs those of the other pages."""
    page = _FOLDER / "reference" / f"{name}.md"
    MoEAuxLossAutoScaler.main_loss_backward_scale = None  # Megatron-Core's loop sets one of another shape than others
    program: dict[str, Any] = {"__name__": name, **given}
    for block in _BLOCK.findall(page.read_text()):
        exec(compile(block, page.name, "exec"), program)


def test_index_is_current() -> None:
    """Signatures and summaries on the page that is read without a renderer; ``python -m tests.reference_index``."""
    assert reference_index.index() == reference_index.FILE.read_text()
