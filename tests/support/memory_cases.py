"""What each rank does in ``tests/test_memory.py``."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.memory import Peaks, peaks
from tests.support.configs import by_name
from tests.support.runs import Bench
from tests.support.world import use_layout


def measure(names: Sequence[str]) -> dict[str, Peaks]:
    """Peak bytes of plain autograd, and of each order under Megatron-Core's own plan and ours, by cell."""
    found = {}
    for name in names:
        cell = by_name(name)
        use_layout(cell)
        bench = Bench(cell)
        found[name] = peaks(bench.model, bench.batches(), bench.loss_grads(), reset=bench.reset)
    return found
