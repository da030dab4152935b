"""The code of the page on weight gradients runs as it stands."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from layernodes.plan.chunk_plan import ChunkPlan

_PAGE = (Path(__file__).parents[1] / "docs" / "weight-gradients.md").read_text()


def test_python_blocks_run_in_order(capsys: pytest.CaptureFixture[str]) -> None:
    """All blocks together are one program; what it prints is what the page says is deferred."""
    program: dict[str, object] = {}
    blocks = re.findall(r"^```python\n(.*?)^```", _PAGE, flags=re.DOTALL | re.MULTILINE)
    assert len(blocks) == 5
    for block in blocks:
        exec(compile(block, "weight-gradients.md", "exec"), program)
    assert isinstance(program["chunk"], ChunkPlan)
    assert capsys.readouterr().out.splitlines() == [
        "pre_dispatch_computation B: ('attention.bias',) W: ('attention.weight',)",
        "mlp B: ('mlp.0.bias', 'mlp.2.bias') W: ('mlp.0.weight', 'mlp.2.weight')",
    ]
