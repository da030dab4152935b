"""The table of supported configurations is what the matrix found, of the cells that it has, and the README agrees."""

from __future__ import annotations

import re

import pytest

from tests.support.compare import Verdict
from tests.support.configs import CELLS, by_name
from tests.support.configurations import PAGE, ROOT, Results, digest, text

_README = (ROOT / "README.md").read_text()


@pytest.fixture(scope="module")
def kept() -> Results:
    """What the matrix found."""
    return Results.load()


def test_every_cell_is_kept_as_it_is(kept: Results) -> None:
    """No cell is missing, none is gone, and none has changed since it ran."""
    assert {name: found.digest for name, found in kept.cells.items()} == {cell.name: digest(cell) for cell in CELLS}, (
        "the matrix is not what tests/configurations.json keeps; run it anew, as tests/support/configurations.py says"
    )


def test_page_is_up_to_date(kept: Results) -> None:
    """The page is what its generator makes of what is kept."""
    assert PAGE.read_text() == text(kept), "run python -W ignore -m tests.support.configurations"


def test_every_cell_is_on_the_page_once(kept: Results) -> None:
    """A row has all cells of its name; the numbers of the tables add up to the matrix."""
    rows = kept.rows()
    assert len({row.name for row in rows}) == len(rows)
    assert sum(len(row.ours) for row in rows) == sum(len(row.megatron) for row in rows) == len(CELLS)
    assert f"| **all** | {len(CELLS)} |" in PAGE.read_text()


def test_ours_equal_the_plain_model_wherever_that_runs(kept: Results) -> None:
    for name, found in kept.cells.items():
        assert found.layernodes == ("unrunnable" if found.megatron == "unrunnable" else "right"), name


def test_readme_has_the_same_numbers(kept: Results) -> None:
    """Its table, column by column, and the size of the matrix."""
    table = re.findall(r"^\| ([a-z, ]+) \| (\d+) \| (\d+) \| (\d+) \|$", _README, flags=re.MULTILINE)
    statuses = ["right", "rounding", "wrong", "crash", "unrunnable"]
    parallel = {c.name for c in CELLS if c.ep > 1 and c.config.get("moe_token_dispatcher_type") != "allgather"}
    expected = [
        (
            sum(found.megatron == status for found in kept.cells.values()),
            sum(found.megatron == status for name, found in kept.cells.items() if name in parallel),
            sum(found.layernodes == status for found in kept.cells.values()),
        )
        for status in statuses
    ]
    assert [tuple(map(int, numbers)) for _, *numbers in table] == expected
    assert f"{len(CELLS)} configurations" in _README


def test_what_is_kept_can_be_contradicted(kept: Results) -> None:
    """By another status of the same cell, in either column; not by a cell that has changed."""
    cell = by_name("dense")
    other = Verdict(name="dense", status="refused")
    assert list(kept.contradicted([(cell, other)], "layernodes")) == ["dense"]
    assert list(kept.contradicted([(cell, other)], "megatron")) == ["dense"]
    assert kept.contradicted([(cell, Verdict(name="dense", status="right"))], "layernodes") == {}
    assert kept.contradicted([(cell.with_config(bf16=True), other)], "layernodes") == {}
