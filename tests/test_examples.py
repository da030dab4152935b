"""The examples of the documentation run, and say that the bits are the plain model's."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[1]
_EXAMPLES = ("override_hook", "add_handoff", "replace_slot")


@pytest.mark.parametrize("name", _EXAMPLES)
def test_example(name: str) -> None:
    """A process of its own, as a reader would start it; the last line is the verdict."""
    done = subprocess.run(
        [sys.executable, str(_ROOT / "docs" / "examples" / f"{name}.py")],
        env={**os.environ, "PYTHONPATH": str(_ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].startswith("bitwise equal: losses and "), done.stdout
