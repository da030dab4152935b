"""Deferred weight gradients on two ranks: tensor parallel with and without sequence parallel, and expert parallel."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.configs import CELLS, Cell
from tests.support.full import FULL
from tests.support.idle_rank import IDLE, check_idle_rank
from tests.support.ranks import values_on_ranks

_CASES = "tests.support.deferred_rank_cases"
_ORDERED: tuple[str, ...] = (
    "jitter",
    "force-balance",
    "global-aux",
    "everything",
    "linear-bias",
    "expert-bias-padding",
)
"""Cells that draw random numbers or keep counts, beside those with dropout: another order gives other numbers."""


def _is_ordered(cell: Cell) -> bool:
    return bool(cell.config.get("hidden_dropout")) or any(word in cell.name for word in _ORDERED)


def test_cells_of_two_ranks() -> None:
    """W at three places and in random order, over every cell of two ranks (of a part by default): plain bits."""
    cells = [c for c in CELLS if c.world_size == 2 and not _is_ordered(c)]
    tensor_parallel = [c.name for c in cells if c.tp == 2]
    others = [c.name for c in cells if c.tp == 1]
    names = tensor_parallel + others if FULL else tensor_parallel[::2] + others[::12]
    assert values_on_ranks(f"{_CASES}:equal_plain", names, 2, seconds=500) == [{}, {}]


_SHARD, _WHOLE, _BATCH, _FLOATS = 16, 32, 4, 4
_WAITING = {
    "column": _FLOATS * _BATCH * (_SHARD * 8 + _WHOLE * 3),
    "row": _FLOATS * _BATCH * (_SHARD * 4 + _SHARD * 6),
}


@pytest.fixture(scope="module")
def of_linears() -> Any:
    """What each of two ranks found out about parallel linears."""
    return values_on_ranks(f"{_CASES}:linears_and_held", _WAITING)


def test_parallel_linears_of_two_ranks(of_linears: Any) -> None:
    """Asynchronous all-reduce, sequence parallel with its gather in W, experts' own communication; one product each."""
    for values, _ in of_linears:
        assert len(values) == 32
        for name, (same, products) in values.items():
            assert same, name
            assert products == [3, 3, 3], name


def test_between_b_and_w_a_rank_holds_its_shard_of_the_sequence(of_linears: Any) -> None:
    """Of a column parallel linear, whose input is sharded: the shard, and the gradient of the whole output; W gathers
    the input again. A row parallel one's input is whole, and a part of its columns."""
    for _, held in of_linears:
        column, row = held["column"], held["row"]
        assert column["waiting"] == _WAITING["column"]
        assert column["gathers"] == {"F": [(_SHARD, _BATCH, 8)], "B": [], "W": [(_SHARD, _BATCH, 8)]}
        assert row["waiting"] == _WAITING["row"]
        assert row["gathers"] == {"F": [], "B": [], "W": []}
        for found in (column, row):
            assert found["left"] == 0
            assert found["same"]


def test_a_rank_without_tokens() -> None:
    """Its experts' gradients are zeros, not None (case 14)."""
    first, second = values_on_ranks(f"{_CASES}:empty_rank", IDLE)
    check_idle_rank(first, second)
