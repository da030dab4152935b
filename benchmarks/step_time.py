"""Step time of a real small model: plainly, under Megatron-Core's plan, under ``install()``, and under our runner.

One step is the forward and the backward of every microbatch, one after the other; nothing overlaps, so that what is
compared is what each way of running costs beside the model's own work:

    plain          model(...), loss.backward()
    megatron       Megatron-Core's schedule plan on its own callables, built for each microbatch
    install        the same plan on our nodes
    runner         a serial schedule on inline streams

On two ranks (EP=2) by default: on one, Megatron-Core's own plan cannot run the layer, and is left out.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist

import layernodes
from benchmarks._measure import alternate, on_ranks, show, table
from layernodes import ChunkPlan, Runner, schedules
from layernodes.demo.data import make_microbatches, read_text
from layernodes.demo.model import build_model
from layernodes.demo.settings import DemoSettings
from layernodes.demo.world import World, demo_world


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
    runs, runner = _runs(model, _batches(settings, world))
    if world.num_ranks == 1:
        del runs["megatron"]

    def together(run: Callable[[], object]) -> Callable[[], None]:
        def step() -> None:
            for parameter in model.parameters():
                parameter.grad = None
            dist.barrier()
            run()

        return step

    with runner:
        times = alternate({name: together(run) for name, run in runs.items()}, repetitions)
    plain = times["plain"].median
    return {
        "ranks": world.num_ranks,
        **settings.model_dump(include={"layers", "hidden", "microbatches"}),
        "repetitions": repetitions,
        "milliseconds_per_step": {name: [1e3 * value for value in found] for name, found in times.items()},
        "milliseconds_per_layer": 1e3 * plain / (settings.layers * settings.microbatches),
        "over_plain": {name: found.median / plain - 1 for name, found in times.items()},
    }


def _batches(settings: DemoSettings, world: World) -> list[dict[str, Any]]:
    microbatches = make_microbatches(
        read_text(None).content,
        settings.microbatches,
        rank=world.rank,
        num_ranks=world.num_ranks,
        device=world.device,
    )
    return [
        {"input_ids": m.tokens, "position_ids": m.positions, "attention_mask": None, "labels": m.labels}
        for m in microbatches
    ]


def _runs(model: Any, batches: list[dict[str, Any]]) -> tuple[dict[str, Callable[[], object]], Runner]:
    def plain() -> None:
        for batch in batches:
            output = model(**batch)
            output.backward(torch.ones_like(output))

    def plan(batch: Mapping[str, Any]) -> None:
        built = model.build_schedule_plan(**batch)
        output = type(built).run(built, None)
        type(built).run(None, built, b_grad=torch.ones_like(output))

    def plans(context: Callable[[], Any]) -> Callable[[], None]:
        def run() -> None:
            with context():
                for batch in batches:
                    plan(batch)

        return run

    chunk = ChunkPlan.build(model)
    schedule = schedules.serial(chunk.shape, len(batches))
    runner = Runner("inline")
    return {
        "plain": plain,
        "megatron": plans(nullcontext),
        "install": plans(layernodes.install),
        "runner": lambda: runner.run(schedule, chunk, batches),
    }, runner


def _text(found: Mapping[str, Any]) -> str:
    rows = [
        (name, *times, f"{100 * found['over_plain'][name]:+.1f} %")
        for name, times in found["milliseconds_per_step"].items()
    ]
    return (
        table(["", "ms / step", "min", "max", "over plain"], rows)
        + f"\n({found['ranks']} ranks; {found['milliseconds_per_layer']:.1f} ms a layer and microbatch, plainly)"
    )


if __name__ == "__main__":
    sys.exit(main())
