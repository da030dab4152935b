"""Any configuration at any shape is right under ``install()``, or refused by name; never wrong, never a crash."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given

import layernodes
from layernodes import UnsupportedLayerError
from tests.support.compare import run_cell, run_plan
from tests.support.configs import Cell
from tests.support.fixtures import MEGATRON_WORLD, megatron_world  # noqa: F401
from tests.support.full import FULL, property_settings
from tests.support.install_cells import draw_cells, install_cells
from tests.support.world import LAYERNODES, run_cells, use_layout

pytestmark = MEGATRON_WORLD

_FEW, _MANY = 12, 150


@pytest.mark.timeout(3600 if FULL else 600)
@property_settings(25)
@given(cell=install_cells())
def test_one_rank(cell: Cell) -> None:
    """EP=1; what the plain model fails on is refused."""
    use_layout(cell)
    verdict = run_cell(cell, layernodes.install)
    if verdict.status == "unrunnable":
        with layernodes.install(), pytest.raises(UnsupportedLayerError):
            run_plan(cell, cell.orders[0])
    else:
        assert verdict.status == "right", (verdict, cell)


@pytest.mark.timeout(3600 if FULL else 600)
def test_two_ranks() -> None:
    """EP=2, all cells in one process group; nearly all of what is drawn can be run by the plain model."""
    cells = draw_cells(_MANY if FULL else _FEW, ep=2)
    verdicts = run_cells(cells, LAYERNODES)
    wrong = [(verdicts[c.name], c) for c in cells if verdicts[c.name].status not in ("right", "unrunnable")]
    assert wrong == []
    assert Counter(v.status for v in verdicts.values())["right"] > 0.8 * len(cells)
