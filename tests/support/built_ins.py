"""Every schedule that the package builds, for one shape; and a cell through all of them on any device and streams."""

from __future__ import annotations

from layernodes import ChunkShape, Schedule, schedules
from tests.support.configs import Cell
from tests.support.deferred_runs import DeferredBench
from tests.support.runs import Bench

PLACES = ("after_b", "next_comm", "end", "first_layer_last")
"""Where ``schedules.deferred`` may put weight gradients."""


def built_ins(shape: ChunkShape, count: int) -> dict[str, Schedule]:
    """The built-in training schedules, by name and options."""
    found = {
        "serial": schedules.serial(shape, count),
        "combined_1f1b": schedules.combined_1f1b(shape, count),
        "early_release": schedules.combined_1f1b(shape, count, early_release=True),
        "forward_forward": schedules.forward_forward(shape, count),
        "forward_forward, all": schedules.forward_forward(shape, count, group=count),
    }
    if shape.wgrad_slots:
        found["megatron_wgrad"] = schedules.combined_1f1b(shape, count, megatron_wgrad=True)
        for place in PLACES:
            found[f"deferred, {place}"] = schedules.deferred(found["combined_1f1b"], shape, place)
        found["deferred forward_forward, next_comm"] = schedules.deferred(found["forward_forward"], shape, "next_comm")
    return found


def check_built_ins(cell: Cell, *, streams: str, device: str = "cpu", wgrad: bool = False) -> dict[str, list[str]]:
    """What is not the plain model's bit for bit, by schedule; with and without the split combine, and forward only."""
    bench = (DeferredBench if wgrad else Bench)(cell, device=device)
    count = len(bench.microbatches)
    wrong: dict[str, list[str]] = {}
    for split_combine in (False, True):
        shape = bench.chunk(split_combine=split_combine).shape
        for name, schedule in built_ins(shape, count).items():
            names = bench.check(schedule, streams=streams, split_combine=split_combine)
            if names:
                wrong[f"{name}, split_combine={split_combine}"] = names
        state = bench.run(
            schedules.forward_only(shape, count, group=count), streams=streams, split_combine=split_combine
        )
        for i, output in enumerate(bench.plain.outputs):
            found = state[f"output/{i}"]
            if found is None or not found.equal(output):
                wrong.setdefault(f"forward_only, split_combine={split_combine}", []).append(f"output/{i}")
    return wrong
