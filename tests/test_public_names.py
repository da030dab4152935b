"""The public names: every one is there, and none needs a framework before it is used."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

import layernodes
from tests.public_surface import FILE, surface


@pytest.mark.parametrize("name", layernodes.__all__)
def test_name_is_what_its_module_defines(name: str) -> None:
    """A public name is the object of its own module."""
    home = importlib.import_module(layernodes._HOME[name])
    expected = getattr(home, name, None) or importlib.import_module(f"{home.__name__}.{name}")
    assert getattr(layernodes, name) is expected


def test_names_are_those_declared() -> None:
    """What loads a name, what documents it and what type checkers see are the same set."""
    declared = Path(layernodes.__file__).read_text(encoding="utf-8").split("if TYPE_CHECKING:")[1].split("_NAMES")[0]
    assert set(layernodes.__all__) == set(layernodes._HOME)
    assert all(name in declared for name in layernodes.__all__)


def test_submodules_are_attributes() -> None:
    """``layernodes.megatron`` needs no import of its own; what does not exist is an AttributeError."""
    assert layernodes.megatron.install is layernodes.install
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = layernodes.nothing


def test_surface_is_frozen() -> None:
    """What goes or changes its parameters is seen here before a user sees it; CHANGELOG says what a version may do."""
    assert surface() == FILE.read_text(), (
        "the public surface differs from tests/public_surface.txt; if that is meant, say so in CHANGELOG.md and run "
        "python -m tests.public_surface"
    )
