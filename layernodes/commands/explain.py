"""``layernodes explain``: why communication is exposed, and what would help."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from typing import Final

from layernodes.command import Command, Write
from layernodes.commands.common import add_json, add_timeline, costs_of, gaps_of, timeline_of
from layernodes.plan.explanation import explain


def _add_arguments(parser: ArgumentParser) -> None:
    add_timeline(parser)
    add_json(parser)


def _run(args: Namespace, write: Write) -> int:
    """Explain the timeline."""
    timeline = timeline_of(args, uses_costs=True)
    explanation = explain(timeline, None if args.costs is None else costs_of(args))
    write(explanation.model_dump_json(indent=2) if args.json else f"{explanation}\n{gaps_of(timeline)}".rstrip())
    return 0


EXPLAIN: Final = Command(
    name="explain",
    summary="say why communication is exposed in a run or a schedule, and what would help",
    add_arguments=_add_arguments,
    run=_run,
)
