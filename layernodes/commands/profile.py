"""``layernodes profile``: what the steps of a real model cost on this machine, as a file of costs."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from typing import Final

from layernodes.command import Command, UsageError, Write
from layernodes.commands.common import check_output
from layernodes.commands.run import add_chunk_arguments
from layernodes.demo.command import add_model_arguments, settings_of
from layernodes.demo.data import make_microbatches, read_text
from layernodes.demo.model import build_model
from layernodes.demo.runner_pass import batch_of
from layernodes.demo.settings import DemoSettings, check_settings
from layernodes.demo.world import World, demo_world, num_launched_ranks
from layernodes.plan.chunk_plan import ChunkPlan
from layernodes.plan.costs import CostModel
from layernodes.plan.measurement import Measurement
from layernodes.plan.profile import profile
from layernodes.plan.units import in_bytes, in_seconds


def _add_arguments(parser: ArgumentParser) -> None:
    add_model_arguments(parser, microbatches="of no effect here, since costs are those of one")
    add_chunk_arguments(parser)
    parser.add_argument("--repetitions", type=int, default=10, metavar="N", help="runs that count (default: 10)")
    parser.add_argument("--warmup", type=int, default=2, metavar="N", help="runs before them (default: 2)")
    parser.add_argument("-o", "--output", default="costs.json", metavar="FILE", help="default: %(default)s")


def _run(options: Namespace, write: Write) -> int:
    settings = settings_of(options)
    check_settings(settings, num_ranks=num_launched_ranks())
    if options.repetitions < 1 or options.warmup < 0:
        raise UsageError(f"--repetitions {options.repetitions}, --warmup {options.warmup}; give at least 1 and 0")
    check_output("output", options.output)
    text = read_text(settings.text)
    with demo_world() as world:
        costs = _profile(options, settings, text.content, world)
        if world.rank == 0:
            costs.save(options.output)
            write(costs.to_json() if options.json else f"{_table(costs)}\nwritten to {options.output}")
        world.wait_for_all()
    return 0


def _profile(options: Namespace, settings: DemoSettings, content: bytes, world: World) -> CostModel:
    model = build_model(settings, num_ranks=world.num_ranks, device=world.device)
    (microbatch,) = make_microbatches(content, 1, rank=world.rank, num_ranks=world.num_ranks, device=world.device)
    chunk = ChunkPlan.build(model, split_combine=options.split_combine, wgrad=options.wgrad)
    return profile(
        chunk,
        batch_of(microbatch),
        repetitions=options.repetitions,
        warmup=options.warmup,
        streams=options.streams,
        name=f"layernodes profile, {world.num_ranks} rank{'s' * (world.num_ranks > 1)}, {world.device.type}",
    )


def _table(costs: CostModel) -> str:
    """The costs of each kind of layer and of the ends, and how far the times spread."""
    rows = [("layers", "slot", "forward", "backward", "weight gradients", "kept to backward", "kept to W")]
    for kind, slots in (*costs.kinds.items(), ("", costs.ends)):
        rows += [
            (
                kind,
                slot,
                in_seconds(c.F),
                in_seconds(c.B),
                in_seconds(c.W) if c.W else "-",
                in_bytes(c.activation_bytes),
                in_bytes(c.wgrad_bytes) if c.W else "-",
            )
            for slot, c in slots.items()
        ]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    lines.insert(1, "  ".join("-" * width for width in widths))
    found = costs.measurement or Measurement()
    return "\n".join(
        [
            *lines,
            f"medians of {found.repetitions} runs on {found.num_ranks} rank{'s' * (found.num_ranks > 1)}, streams "
            f"{found.streams}; half of a step's times are typically within {100 * found.typical_spread:.1f} %",
            f"computation takes {costs.compute_slowdown:.2f} times as long beside communication, and communication "
            f"{costs.communication_slowdown:.2f} times beside computation",
        ]
    )


PROFILE: Final = Command(
    name="profile",
    summary="measure what the steps of a Megatron-Core MoE model cost here, and write the costs to a file",
    add_arguments=_add_arguments,
    run=_run,
)
