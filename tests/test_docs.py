"""The site's code runs as it stands, its commands parse, and its reference has every public name."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import layernodes
import layernodes.pipelining
from layernodes import testing
from layernodes.cli import COMMANDS

_FOLDER = Path(__file__).parents[1] / "docs"
_PAGES = sorted(path.relative_to(_FOLDER).as_posix() for path in _FOLDER.rglob("*.md"))
_WITH_A_MODEL = {"hybrid.md", "timelines.md"}
"""Pages whose code needs something given: ``test_hybrid_page.py`` and ``test_timelines_page.py`` run it."""
_NAV = (_FOLDER.parent / "mkdocs.yml").read_text()


def _blocks(page: str, language: str) -> list[str]:
    text = (_FOLDER / page).read_text()
    return re.findall(rf"^```{language}\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("page", [p for p in _PAGES if p not in _WITH_A_MODEL and _blocks(p, "python")])
def test_python_blocks_run_in_order(page: str) -> None:
    """All blocks of a page together are one program."""
    program: dict[str, object] = {"__name__": page}
    for block in _blocks(page, "python"):
        exec(compile(block, page, "exec"), program)


@pytest.mark.parametrize("page", _PAGES)
def test_page_is_in_the_navigation(page: str) -> None:
    assert f": {page}\n" in _NAV


@pytest.mark.parametrize("page", _PAGES)
def test_what_a_page_names_exists(page: str) -> None:
    """Commands of the command line, and files."""
    text = (_FOLDER / page).read_text()
    called = re.findall(r"^layernodes ([a-z]+)", text, flags=re.MULTILINE)
    assert set(called) <= set(COMMANDS)
    for name in re.findall(r"`((?:docs|layernodes|benchmarks|tests)/[\w/]+\.(?:py|md))", text):
        assert (_FOLDER.parent / name).is_file(), name


def test_reference_has_every_public_name() -> None:
    """Each is listed by the place where it is defined, once."""
    listed = re.findall(r"^::: (\S+)$", (_FOLDER / "reference.md").read_text(), flags=re.MULTILINE)
    assert len(set(listed)) == len(listed)
    names = {path.rpartition(".")[2] for path in listed}
    assert {*layernodes.__all__, *testing.__all__, *layernodes.pipelining.__all__, "schedule"} == names
