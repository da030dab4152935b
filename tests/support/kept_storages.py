"""Which inputs a run of Megatron-Core layers frees and which it keeps (case 12); run as a process of its own.

Prints, as JSON, by cell and step of the first layer and microbatch: for each input of the slot whether its storage is
still there after the slot's forward; and the names of what was not the plain model's bit for bit.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any
from unittest import mock

from torch import Tensor

import layernodes
from layernodes import Step, release, schedules
from tests.support.configs import by_name
from tests.support.runs import Bench
from tests.support.world import single_process_world


def kept(name: str) -> tuple[dict[str, list[bool]], list[str]]:
    """What is kept of each slot's inputs, and what differs from the plain model."""
    bench = Bench(by_name(name))
    schedule = schedules.serial(bench.chunk().shape, len(bench.microbatches))
    found: dict[str, list[bool]] = {}
    running = ""

    def note(step: Step) -> None:
        nonlocal running
        running = str(step)

    def releasing(outers: Sequence[object], inners: Sequence[object], lane: Any = None, **options: bool) -> int:
        count = release.release_inputs(outers, inners, lane, **options)
        if running.startswith("F0.L0."):
            found[running] = [t.untyped_storage().nbytes() > 0 for t in outers if isinstance(t, Tensor)]
        return count

    with mock.patch("layernodes.plan.slot_run.release_inputs", releasing):
        return found, bench.check(schedule, before_step=note)


if __name__ == "__main__":
    with layernodes.cpu_host(), single_process_world():
        print(json.dumps({name: kept(name) for name in sys.argv[1:]}))
