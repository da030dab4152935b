"""The code of the page on hybrid models runs as it stands and prints what the page says."""

from __future__ import annotations

import re
from pathlib import Path

from tests.support.launched import launched

_ROOT = Path(__file__).parents[1]
_PAGE = (_ROOT / "docs" / "hybrid.md").read_text()


def _blocks(kind: str) -> list[str]:
    found: list[str] = re.findall(rf"^```{kind}\n(.*?)^```", _PAGE, flags=re.DOTALL | re.MULTILINE)
    return found


def test_python_blocks_run_in_order() -> None:
    """All blocks together are one program, in a process of its own."""
    assert len(_blocks("python")) == 4
    paths = f"import sys\nsys.path.insert(0, {str(_ROOT / 'docs' / 'examples')!r})\n"
    done = launched("-c", paths + "".join(_blocks("python")))
    assert done.returncode == 0, done.stderr
    assert done.stdout == "".join(_blocks("text"))
