"""The code of the page on hybrid models runs as it stands and prints what the page says."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

_ROOT = Path(__file__).parents[1]
_PAGE = (_ROOT / "docs" / "hybrid.md").read_text()


def _blocks(kind: str) -> list[str]:
    found: list[str] = re.findall(rf"^```{kind}\n(.*?)^```", _PAGE, flags=re.DOTALL | re.MULTILINE)
    return found


def test_python_blocks_run_in_order() -> None:
    """All blocks together are one program, in a process of its own."""
    assert len(_blocks("python")) == 4
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", "".join(_blocks("python"))],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(_ROOT), str(_ROOT / "docs" / "examples")]),
            "OMP_NUM_THREADS": "1",
        },
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "".join(_blocks("text"))
