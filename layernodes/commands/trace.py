"""``layernodes trace``: a predicted timeline as a trace for ui.perfetto.dev or chrome://tracing."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from typing import Final

from layernodes.command import Command, Write
from layernodes.commands.common import add_json, add_timeline, check_output, timeline_of, write_json


def _add_arguments(parser: ArgumentParser) -> None:
    add_timeline(parser)
    parser.add_argument("-o", "--output", default="trace.json", metavar="FILE", help="default: %(default)s")

    add_json(parser)


def _run(args: Namespace, write: Write) -> int:
    """Get the timeline, and write the file."""
    check_output("output", args.output)
    timeline = timeline_of(args)
    timeline.to_perfetto(args.output)
    if args.json:
        write_json(write, {"output": args.output, **timeline.summary().model_dump(mode="json")})
    else:
        write(f"written to {args.output}")
    return 0


TRACE: Final = Command(
    name="trace",
    summary="write a predicted timeline for ui.perfetto.dev or chrome://tracing",
    add_arguments=_add_arguments,
    run=_run,
)
