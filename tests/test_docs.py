"""The site's code runs as it stands, its commands parse, and what it names exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from layernodes.cli import COMMANDS

_FOLDER = Path(__file__).parents[1] / "docs"
_PAGES = sorted(path.relative_to(_FOLDER).as_posix() for path in _FOLDER.rglob("*.md"))
_WITH_A_MODEL = {"hybrid.md", "timelines.md", *(f"reference/{name}.md" for name in ("plans", "megatron", "pipelining"))}
"""Pages whose code needs something given: ``test_{hybrid,timelines}_page.py`` and ``test_reference.py`` run it."""
_NAV = (_FOLDER.parent / "mkdocs.yml").read_text()


def _blocks(page: str, language: str) -> list[str]:
    text = (_FOLDER / page).read_text()
    return re.findall(rf"^```{language}\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("page", [p for p in _PAGES if p not in _WITH_A_MODEL and _blocks(p, "python")])
def test_python_blocks_run_in_order(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All blocks of a page together are one program; what it writes goes into a folder that is thrown away."""
    monkeypatch.chdir(tmp_path)
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
