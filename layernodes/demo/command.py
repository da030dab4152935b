"""``layernodes demo``: its arguments, and what it prints."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from contextlib import closing
from pathlib import Path
from typing import Final

from layernodes.command import Command, Write, add_mtp
from layernodes.demo.data import read_text
from layernodes.demo.progress import ProgressBar
from layernodes.demo.report import render
from layernodes.demo.run import demonstrate, num_ticks
from layernodes.demo.settings import DemoSettings, check_settings
from layernodes.demo.world import demo_world, num_launched_ranks

_DEFAULTS: Final = DemoSettings()


def add_model_arguments(parser: ArgumentParser, *, microbatches: str = "two are in flight at once") -> None:
    """Declare the arguments that make ``DemoSettings``, and ``--json``; ``microbatches`` says what becomes of those."""
    parser.add_argument(
        "--text", type=Path, metavar="FILE", help="text whose bytes are the tokens (default: one that is shipped)"
    )
    for name, what in {
        "layers": "decoder layers",
        "hidden": "hidden size",
        "experts": "routed experts of each MoE layer, shared by all ranks",
        "topk": "experts that each token goes to",
        "microbatches": f"microbatches; {microbatches}",
        "seed": "seed of weights and dropout",
    }.items():
        default = getattr(_DEFAULTS, name)
        parser.add_argument(f"--{name}", type=int, metavar="N", default=default, help=f"{what} (default: {default})")
    add_mtp(parser)
    parser.add_argument("--dense-last", action="store_true", help="make the last decoder layer dense")
    parser.add_argument("--no-dropout", action="store_true", help="leave dropout out (default: 0.1)")
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of tables")


def settings_of(options: Namespace) -> DemoSettings:
    """The settings among parsed options."""
    return DemoSettings(**{name: getattr(options, name) for name in DemoSettings.model_fields})


def _run(options: Namespace, write: Write) -> int:
    settings = settings_of(options)
    check_settings(settings, num_ranks=num_launched_ranks())
    text = read_text(settings.text)
    with demo_world() as world:
        with closing(ProgressBar(num_ticks(settings), sys.stderr if world.rank == 0 else None)) as progress:
            report = demonstrate(settings, text, world, tick=progress.tick)
        if world.rank == 0:
            write(report.model_dump_json(indent=2) if options.json else render(report))
        world.wait_for_all()  # a launcher kills the others as soon as one rank has exited with an error
    return 0 if report.verdict.equal else 1


DEMO: Final = Command(
    name="demo",
    summary="run a Megatron-Core MoE model on real text, plainly and through the nodes, and compare them bit for bit",
    add_arguments=add_model_arguments,
    run=_run,
)
