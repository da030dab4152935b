"""Step time of a real small model: plainly, under Megatron-Core's plan, under ``install()``, and under our runner.

One step is the forward and the backward of every microbatch, one after the other; nothing overlaps, so that what is
compared is what each way of running costs beside the model's own work:

    plain          model(...), loss.backward()
    cuts           plain, and four times a layer one leaf and one call of autograd's engine on a tiny tensor: the least
                   that cutting a layer into slots takes, whoever does it
    megatron       Megatron-Core's schedule plan on its own callables, built for each microbatch
    install        the same plan on our nodes, put in place beforehand
    runner         a serial schedule on inline streams

Beside the time of a step stands the processor time of rank 0, which leaves out waiting: for the other rank, and for a
core where other work runs.

On two ranks (EP=2) by default: on one, Megatron-Core's own plan cannot run the layer, and is left out.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd import Variable
from torch.utils.hooks import RemovableHandle

import layernodes
from benchmarks._measure import alternate, keep_freed_memory, on_ranks, show, table
from benchmarks._ways import demo_batches, plain, serial_plans
from layernodes import ChunkPlan, Runner, schedules
from layernodes.demo.model import build_model, seed_everything
from layernodes.demo.settings import DemoSettings
from layernodes.demo.world import World, demo_world

_AUDITED = 4
"""The edges of a new node's first forwards are checked, which is no part of a step: the first, second and fourth."""


def main() -> int:
    """Print the table; with ``--json`` one document."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=192)
    parser.add_argument("--microbatches", type=int, default=2)
    parser.add_argument("--repetitions", type=int, default=15)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    ended = on_ranks(options.ranks, "benchmarks.step_time", sys.argv[1:])
    if ended is not None:
        return ended
    with demo_world() as world:
        settings = DemoSettings(layers=options.layers, hidden=options.hidden, microbatches=options.microbatches)
        found = measure(settings, world, options.repetitions)
        if world.rank == 0:
            show(found, _text(found), as_json=options.json)
    return 0


def measure(settings: DemoSettings, world: World, repetitions: int) -> dict[str, Any]:
    """Milliseconds a step of each way, median and spread, and what it takes over the plain model."""
    model = build_model(settings, num_ranks=world.num_ranks, device=world.device)
    batches, gradients = demo_batches(settings, world)
    chunk = ChunkPlan.build(model)
    schedule = schedules.serial(chunk.shape, len(batches))
    installation = layernodes.install()
    plans = partial(serial_plans, model, batches, gradients)
    runs: dict[str, Callable[[], object]] = {"plain": partial(plain, model, batches, gradients)}
    runs["cuts"] = runs["plain"]
    cuts: list[RemovableHandle] = []
    if world.num_ranks > 1:
        runs["megatron"] = plans
    runs["install"] = plans

    def before(name: str) -> None:
        if name == "install":
            installation.start()
            for _ in range(math.ceil(_AUDITED / len(batches))):
                plans()
        elif installation.active:
            installation.stop()
        if name == "cuts":
            cuts.extend(_cut(model))
        while name != "cuts" and cuts:
            cuts.pop().remove()
        model.zero_grad()
        seed_everything(settings.seed)  # so that tokens travel alike in all of them
        dist.barrier()

    keep_freed_memory()
    with Runner("inline") as runner:
        runs["runner"] = partial(runner.run, schedule, chunk, batches, gradients)
        times = alternate(runs, repetitions, before=before)
    base = times["plain"]
    return {
        "ranks": world.num_ranks,
        **settings.model_dump(include={"layers", "hidden", "microbatches"}),
        "repetitions": repetitions,
        "milliseconds_per_step": {name: [1e3 * value for value in found] for name, found in times.items()},
        "milliseconds_per_layer": 1e3 * base.median / (settings.layers * settings.microbatches),
        "over_plain": {name: found.median / base.median - 1 for name, found in times.items()},
        "processor_over_plain": {name: found.processor / base.processor - 1 for name, found in times.items()},
    }


def _cut(model: Any) -> Iterator[RemovableHandle]:
    """Four cuts a layer, spread over it as slots are, so that each finds the caches as a slot does."""
    tiny = torch.ones(1)

    def cut(*_: object) -> None:
        with torch.enable_grad():
            leaf = tiny.detach().requires_grad_(True)
            output = leaf * 2.0
        Variable._execution_engine.run_backward(
            (output,), (tiny,), False, False, (), allow_unreachable=True, accumulate_grad=True
        )

    for layer in model.decoder.layers:
        for module in (layer.input_layernorm, layer.pre_mlp_layernorm, layer.mlp.router, layer.mlp.experts):
            yield module.register_forward_pre_hook(cut)


def _text(found: Mapping[str, Any]) -> str:
    rows = [
        (name, *times, *(f"{100 * found[over][name]:+.1f} %" for over in ("over_plain", "processor_over_plain")))
        for name, times in found["milliseconds_per_step"].items()
    ]
    return (
        table(["", "ms / step", "min", "max", "processor", "over plain", "processor"], rows)
        + f"\n({found['ranks']} ranks; {found['milliseconds_per_layer']:.1f} ms a layer and microbatch, plainly)"
    )


if __name__ == "__main__":
    sys.exit(main())
