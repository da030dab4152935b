"""``layernodes explain``: why communication is exposed, and what would help."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import Final

from layernodes.command import Command, UsageError, Write
from layernodes.commands.common import add_costs, add_json, add_schedule, costs_of, is_trace_file, schedule_of
from layernodes.plan.explanation import explain
from layernodes.plan.simulate import simulate
from layernodes.plan.timeline import Timeline


def _add_arguments(parser: ArgumentParser) -> None:
    add_schedule(parser, also="a trace of a run (layernodes run --trace FILE)")
    add_costs(parser, required=False)
    add_json(parser)


def _run(args: Namespace, write: Write) -> int:
    """Explain a trace, or simulate a schedule and explain that."""
    if is_trace_file(args.schedule):
        timeline = Timeline.from_perfetto(Path(args.schedule))
    else:
        schedule = schedule_of(args)
        if args.costs is None:
            raise UsageError(
                f"{args.schedule} is a schedule and no trace of a run; say with --costs what its steps cost"
            )
        timeline = simulate(schedule, costs_of(args))
    explanation = explain(timeline, None if args.costs is None else costs_of(args))
    write(explanation.model_dump_json(indent=2) if args.json else str(explanation))
    return 0


EXPLAIN: Final = Command(
    name="explain",
    summary="say why communication is exposed in a run or a schedule, and what would help",
    add_arguments=_add_arguments,
    run=_run,
)
