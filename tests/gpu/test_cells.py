"""Megatron-Core models on an accelerator: the cells of the CPU suite, through every built-in schedule and random ones.

``tests/plan/test_device_cells.py`` runs the same functions on the CPU. Run this with ``pytest -m gpu`` where an
accelerator is at hand; kernels are the deterministic ones, since the plain model is compared bit for bit.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from tests.support.built_ins import check_built_ins
from tests.support.cells import device_cells
from tests.support.configs import Cell
from tests.support.fixtures import MEGATRON_WORLD, megatron_world  # noqa: F401
from tests.support.runs import check_random_schedules

pytestmark = [pytest.mark.gpu, *MEGATRON_WORLD]


@pytest.fixture(scope="module", autouse=True)
def deterministic() -> Iterator[None]:
    """Sums in a fixed order."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("wgrad", [False, True])
@pytest.mark.parametrize("cell", device_cells(), ids=lambda cell: cell.name)
def test_built_ins(cell: Cell, wgrad: bool) -> None:
    """Outputs and every gradient are the plain model's on two streams, weight gradients deferred or not."""
    assert check_built_ins(cell, streams="cuda", device="cuda", wgrad=wgrad) == {}


@pytest.mark.parametrize("cell", device_cells(), ids=lambda cell: cell.name)
def test_random_schedules(cell: Cell) -> None:
    """So they are in any valid order."""
    assert check_random_schedules(cell, 5, streams="cuda", device="cuda") == {}
