"""Deferred weight gradients on two ranks: tensor parallel with and without sequence parallel, and expert parallel."""

from __future__ import annotations

from tests.support.configs import CELLS
from tests.support.full import FULL
from tests.support.idle_rank import IDLE, check_idle_rank
from tests.support.ranks import values_on_ranks

_CASES = "tests.support.deferred_rank_cases"
_ORDERED: tuple[str, ...] = (
    "dropout",
    "jitter",
    "force-balance",
    "global-aux",
    "everything",
    "linear-bias",
    "expert-bias-padding",
)


def test_cells_of_two_ranks() -> None:
    """W at three places and in random order, over every cell of two ranks (of a part by default): plain bits."""
    cells = [c for c in CELLS if c.world_size == 2 and not any(word in c.name for word in _ORDERED)]
    tensor_parallel = [c.name for c in cells if c.tp == 2]
    others = [c.name for c in cells if c.tp == 1]
    names = tensor_parallel + others if FULL else tensor_parallel[::2] + others[::12]
    assert values_on_ranks(f"{_CASES}:equal_plain", names, 2, seconds=500) == [{}, {}]


def test_parallel_linears_of_two_ranks() -> None:
    """Asynchronous all-reduce, sequence parallel with its gather in W, experts' own communication; one product each."""
    for values in values_on_ranks(f"{_CASES}:linears"):
        assert len(values) == 32
        for name, (same, products) in values.items():
            assert same, name
            assert products == [3, 3, 3], name


def test_a_rank_without_tokens() -> None:
    """Its experts' gradients are zeros, not None (case 14)."""
    first, second = values_on_ranks(f"{_CASES}:empty_rank", IDLE)
    check_idle_rank(first, second)
