"""Schedules are pure data: they load neither torch nor Megatron-Core."""

from __future__ import annotations

import subprocess
import sys


def test_no_framework_is_imported() -> None:
    """Everything from steps to built-in pairs imports without torch and Megatron-Core."""
    code = (
        "import sys, layernodes.plan.pairs, layernodes.plan.schedules, layernodes.plan.validate\n"
        "sys.exit(', '.join({'torch', 'megatron'} & set(sys.modules)) or None)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
