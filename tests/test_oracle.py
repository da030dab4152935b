"""The oracle itself, on schedules small enough to judge by eye."""

from __future__ import annotations

import ast
import random
from itertools import permutations
from pathlib import Path

import pytest

from tests import oracle

CHUNK: oracle.Chunk = {
    "pre": False,
    "post": False,
    "layers": [{"slots": ["a", "b"], "optional": ["b"], "wgrad": ["a"]}],
}


def test_imports_nothing_of_the_package() -> None:
    """A rule shared with the package would hide its own errors."""
    tree = ast.parse(Path(oracle.__file__).read_text(encoding="utf-8"))
    modules = [node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    modules += [name.name for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names]
    assert not [module for module in modules if module and module.startswith("layernodes")]


def test_all_orders_of_one_microbatch() -> None:
    """Of the 6 orders of F a, B a, W a one is valid; with b named, of the 120 orders of 5 steps, those of one line."""
    steps = ["F0.L0.a", "B0.L0.a", "W0.L0.a"]
    assert [order for order in permutations(steps) if not oracle.faults(list(order), CHUNK, 1)] == [tuple(steps)]
    five = ["F0.L0.a", "F0.L0.b", "B0.L0.b", "B0.L0.a", "W0.L0.a"]
    assert [order for order in permutations(five) if not oracle.faults(list(order), CHUNK, 1)] == [tuple(five)]


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("F0.L0.a B0.L0.a W0.L0.a F1.L0.a B1.L0.a W1.L0.a", None),
        ("F0.L0.a F1.L0.a B1.L0.a B0.L0.a W1.L0.a W0.L0.a", None),
        ("F0.L0.a F1.L0.a B1.L0.a B0.L0.a W0.L0.a W1.L0.a", "queue"),
        ("F0.L0.a F1.L0.a B0.L0.a W0.L0.a B1.L0.a", "missing W1.L0.a"),
        ("F0.L0.a F1.L0.a B0.L0.a W0.L0.a B1.L0.a W1.L0.a W1.L0.a", "duplicate W1.L0.a"),
        ("F0.L0.a F1.L0.a B0.L0.a W0.L0.a W1.L0.a B1.L0.a", "order W1.L0.a before B1.L0.a"),
        ("F0.L0.a F1.L0.a B0.L0.a W0.L0.a B1.L0.a W1.L0.a F2.L0.a", "foreign F2.L0.a"),
        ("F0.L0.a F1.L0.a B0.L0.a W0.L0.a B1.L0.a W1.L0.a W1.L0.b", "foreign W1.L0.b"),
    ],
)
def test_two_microbatches(text: str, fault: str | None) -> None:
    """Each fault is found, alone."""
    found = oracle.faults(text.split(), CHUNK, 2)
    assert len(found) == (fault is not None)
    assert fault is None or found[0].startswith(fault)


def test_generator_is_valid_and_varied() -> None:
    """Random schedules have no fault and differ; every one of the few possible orders turns up."""
    drawn = {tuple(oracle.random_schedule(CHUNK, 2, random.Random(seed))) for seed in range(300)}
    assert all(not oracle.faults(list(order), CHUNK, 2) for order in drawn)
    steps = [step for step in oracle.all_steps(CHUNK, 2) if not step.endswith(".b")]
    valid = {order for order in permutations(steps) if not oracle.faults(list(order), CHUNK, 2)}
    assert valid <= {tuple(step for step in order if not step.endswith(".b")) for order in drawn}


def test_pairs() -> None:
    """F0 of one chunk beside B1 and W1 of another."""
    assert not oracle.pair_faults(["B1.L0.a", "F0.L0.a", "W1.L0.a"], CHUNK, CHUNK)
    assert not oracle.pair_faults(["F0.L0.a"], CHUNK, None)
    assert oracle.pair_faults(["W1.L0.a", "F0.L0.a", "B1.L0.a"], CHUNK, CHUNK)
    assert oracle.pair_faults(["F0.L0.a", "B0.L0.a"], CHUNK, None) == ["foreign B0.L0.a"]
