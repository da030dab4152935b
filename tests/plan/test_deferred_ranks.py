"""Deferred weight gradients on two ranks: tensor parallel with and without sequence parallel, and expert parallel."""

from __future__ import annotations

import os
from typing import Any

from tests.support.configs import CELLS
from tests.support.ranks import Outcome, run_on_ranks

_CASES = "tests.support.deferred_rank_cases"
_FULL = bool(os.environ.get("LAYERNODES_FULL"))
_ORDERED: tuple[str, ...] = (
    "dropout",
    "jitter",
    "force-balance",
    "global-aux",
    "everything",
    "linear-bias",
    "expert-bias-padding",
)


def _values(outcomes: list[Outcome]) -> list[Any]:
    for rank, outcome in enumerate(outcomes):
        assert not outcome.error, f"rank {rank}: {outcome.error}\n{outcome.log}"
    return [outcome.value for outcome in outcomes]


def test_cells_of_two_ranks() -> None:
    """W at three places and in random order, over every cell of two ranks (of a part by default): plain bits."""
    cells = [c for c in CELLS if c.world_size == 2 and not any(word in c.name for word in _ORDERED)]
    tensor_parallel = [c.name for c in cells if c.tp == 2]
    others = [c.name for c in cells if c.tp == 1]
    names = tensor_parallel + others if _FULL else tensor_parallel[::2] + others[::12]
    assert _values(run_on_ranks(f"{_CASES}:equal_plain", names, 2, seconds=500)) == [{}, {}]


def test_parallel_linears_of_two_ranks() -> None:
    """Asynchronous all-reduce, sequence parallel with its gather in W, experts' own communication; one product each."""
    for values in _values(run_on_ranks(f"{_CASES}:linears")):
        assert len(values) == 32
        for name, (same, products) in values.items():
            assert same, name
            assert products == [3, 3, 3], name


def test_a_rank_without_tokens() -> None:
    """Its experts' gradients are zeros, not None (case 14)."""
    names = ["idle-rank", "idle-rank-mtp", "idle-rank-allgather", "idle-rank-deepep"]
    first, second = _values(run_on_ranks(f"{_CASES}:empty_rank", names))
    for case in first:
        if case.endswith("gradients"):
            assert None not in [*first[case], *second[case]], case
            assert {any(first[case]), any(second[case])} == {True, False}, case
        else:
            assert first[case] == second[case] == [], case
