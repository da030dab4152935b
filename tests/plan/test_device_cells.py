"""What ``tests/gpu/test_cells.py`` runs on an accelerator, on the CPU's threads: a part of its cells by default."""

from __future__ import annotations

import pytest

from tests.support.built_ins import check_built_ins
from tests.support.cells import device_cells
from tests.support.configs import Cell
from tests.support.fixtures import MEGATRON_WORLD, megatron_world  # noqa: F401
from tests.support.full import FULL
from tests.support.runs import check_random_schedules

pytestmark = MEGATRON_WORLD
_CELLS = device_cells()
_CHOSEN = _CELLS if FULL else _CELLS[::20]


@pytest.mark.parametrize("wgrad", [False, True])
@pytest.mark.parametrize("cell", _CHOSEN, ids=lambda cell: cell.name)
def test_built_ins(cell: Cell, wgrad: bool) -> None:
    """Outputs and every gradient are the plain model's on two threads, weight gradients deferred or not."""
    assert check_built_ins(cell, streams="threads", wgrad=wgrad) == {}


@pytest.mark.parametrize("cell", _CHOSEN, ids=lambda cell: cell.name)
def test_random_schedules(cell: Cell) -> None:
    """So they are in any valid order."""
    assert check_random_schedules(cell, 2, streams="threads") == {}
