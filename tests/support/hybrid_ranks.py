"""What each rank does for ``tests/megatron/test_hybrid.py``."""

from __future__ import annotations

import random
import time
from collections.abc import Mapping

import torch.distributed as dist

from layernodes import Step, schedules
from tests.support.cells import is_ordered
from tests.support.configs import Cell
from tests.support.deferred_runs import DeferredBench, random_deferred_schedule
from tests.support.full import FULL
from tests.support.runs import Bench, random_schedule
from tests.support.world import use_layout


def equal_plain(cells: Mapping[str, Cell]) -> dict[str, list[str]]:
    """Built-in and random schedules of each cell, grouped and not, with random delays; what differs, by case."""
    found: dict[str, list[str]] = {}
    for name, cell in cells.items():
        use_layout(cell)
        for group in (False, True):
            bench = Bench(cell, group=group)
            count, shape = len(bench.microbatches), bench.chunk().shape
            cases = {"combined_1f1b": schedules.combined_1f1b(shape, count)}
            if not is_ordered(cell):
                cases |= {f"random {seed}": random_schedule(bench, seed) for seed in range(3 if FULL else 1)}
            for case, schedule in cases.items():
                delay = random.Random(f"{dist.get_rank()} {name} {case}")

                def wait(_: Step, delay: random.Random = delay) -> None:
                    if delay.random() < 0.2:
                        time.sleep(delay.random() * 0.004)

                differing = bench.check(schedule, streams="threads", before_step=wait)
                if differing:
                    found[f"{name} {case} group={group}"] = differing[:5]
            if not is_ordered(cell):
                deferred = DeferredBench(cell, group=group)
                differing = deferred.check(random_deferred_schedule(deferred, 5), streams="threads")
                if differing:
                    found[f"{name} deferred group={group}"] = differing[:5]
    return found
