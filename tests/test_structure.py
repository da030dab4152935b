"""The package's own rules: imports point one way, Megatron's private names stay in the adapter, nothing is hidden."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

import pytest

import layernodes

_ROOT = Path(layernodes.__file__).parent
_FILES = sorted(path.relative_to(_ROOT).as_posix() for path in _ROOT.rglob("*.py"))

# Later layers may import earlier ones. Files of the package's root that are not named stand above all.
_LAYERS: tuple[tuple[str, ...], ...] = (
    ("errors.py", "slots.py"),
    ("autograd.py", "deferred_weight.py", "lane.py", "release.py", "stand_in.py", "state.py", "wgrad.py"),
    ("streams.py", "device_streams.py", "quiet.py"),
    ("_megatron/", "cpu.py", "_cpu_device.py", "_cpu_linear.py", "_cpu_norm.py", "linear.py"),
    ("nodes/",),
    ("plan/",),
)
_TOP = len(_LAYERS)
# Megatron's private modules and what only the adapter may know.
_ADAPTER = ("_megatron/", "cpu.py", "_cpu_device.py", "_cpu_linear.py", "_cpu_norm.py")
_PUBLIC_OF_MEGATRON = (
    "megatron.core.transformer.transformer_layer",
    "megatron.core.transformer.multi_token_prediction",
)


@functools.cache
def _tree(name: str) -> ast.Module:
    return ast.parse((_ROOT / name).read_text())


def _rank(name: str) -> int:
    for rank, prefixes in enumerate(_LAYERS):
        if any(name == prefix or (prefix.endswith("/") and name.startswith(prefix)) for prefix in prefixes):
            return rank
    return _TOP


def _imports(name: str) -> Iterator[tuple[ast.stmt, str]]:
    """Every import statement of a file, with the module that it names."""
    for node in ast.walk(_tree(name)):
        if isinstance(node, ast.ImportFrom):
            yield node, node.module or ""
        elif isinstance(node, ast.Import):
            yield from ((node, alias.name) for alias in node.names)


def _file_of(module: str) -> str | None:
    parts = module.split(".")
    if parts[0] != "layernodes":
        return None
    path = "/".join(parts[1:])
    for candidate in (f"{path}.py", f"{path}/__init__.py"):
        if candidate in _FILES:
            return candidate
    return None


@pytest.mark.parametrize("name", _FILES)
def test_imports_point_one_way(name: str) -> None:
    """errors, slots -> state, streams -> _megatron, cpu -> nodes -> plan -> the rest."""
    for node, module in _imports(name):
        file = _file_of(module)
        if file is not None and _rank(name) < _TOP:
            assert _rank(file) <= _rank(name), f"{name}:{node.lineno} imports {module}, which stands above it"


def test_no_cycles() -> None:
    """Within a layer, imports form no cycle either (those for type checkers aside)."""
    edges = {name: {f for _, m in _runtime_imports(name) if (f := _file_of(m)) and f != name} for name in _FILES}
    done: set[str] = set()

    def visit(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, f"import cycle: {' -> '.join((*path, name))}"
        if name not in done:
            for imported in edges[name]:
                visit(imported, (*path, name))
            done.add(name)

    for name in _FILES:
        visit(name, ())


def _runtime_imports(name: str) -> Iterator[tuple[ast.stmt, str]]:
    tree = _tree(name)
    checked = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    yield from ((node, module) for node, module in _imports(name) if id(node) not in checked)


@pytest.mark.parametrize("name", _FILES)
def test_no_imports_inside_functions(name: str) -> None:
    """What a file needs stands at its top."""
    for function in ast.walk(_tree(name)):
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            inner = [node.lineno for node in ast.walk(function) if isinstance(node, ast.Import | ast.ImportFrom)]
            assert inner == [], f"{name}:{inner} imports inside {function.name}()"


def _uses_megatron(name: str) -> list[str]:
    return [
        module
        for _, module in _runtime_imports(name)
        if module.split(".")[0] == "megatron" and module not in _PUBLIC_OF_MEGATRON
    ]


@pytest.mark.parametrize("name", [name for name in _FILES if not name.startswith(_ADAPTER)])
def test_megatron_is_used_in_the_adapter_only(name: str) -> None:
    """Outside ``_megatron/`` and the CPU host nothing imports Megatron at run time; layer classes name types only."""
    assert _uses_megatron(name) == [] or name.startswith("demo"), f"{name} imports {_uses_megatron(name)}"


@pytest.mark.parametrize("name", [name for name in _FILES if not name.startswith(_ADAPTER)])
def test_megatrons_private_attributes_are_used_in_the_adapter_only(name: str) -> None:
    """Names such as ``_forward_attention`` or ``_comm_manager`` appear nowhere else."""
    names = {
        *("_forward_attention", "_forward_mlp", "_forward_post_mlp", "_comm_manager", "_te_cuda_graph_replay"),
        *("_get_embeddings", "_concat_embeddings", "backward_dw_wrapper", "token_dispatcher", "mtp_model_layer"),
    }
    used = {node.attr for node in ast.walk(_tree(name)) if isinstance(node, ast.Attribute)}
    used |= {node.value for node in ast.walk(_tree(name)) if isinstance(node, ast.Constant) and node.value in names}
    assert used & names == set()


def test_all_names_are_there() -> None:
    """``__all__`` is sorted in the usual way, without doubles, and every name in it exists."""
    assert len(set(layernodes.__all__)) == len(layernodes.__all__)
    for name in layernodes.__all__:
        assert hasattr(layernodes, name), name


@pytest.mark.parametrize("name", _FILES)
def test_every_module_says_what_it_is(name: str) -> None:
    """Each opens with a docstring."""
    assert ast.get_docstring(_tree(name)), name
