"""``layernodes trace``: a predicted timeline as a trace for ui.perfetto.dev or chrome://tracing."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from layernodes.commands.common import OK, add_costs, add_json, add_schedule, in_words, plain, print_json, timeline_of

if TYPE_CHECKING:
    from layernodes.commands.common import Subparsers


def add_parser(subparsers: Subparsers) -> None:
    """Add the subcommand."""
    parser = subparsers.add_parser("trace", help="write a trace for Perfetto", description=plain(__doc__))
    add_schedule(parser)
    add_costs(parser)
    parser.add_argument("-o", "--output", default="trace.json", metavar="FILE", help="default: %(default)s")

    add_json(parser)
    parser.set_defaults(run=run)


@in_words
def run(args: argparse.Namespace) -> int:
    """Simulate, and write the file."""
    timeline = timeline_of(args)
    timeline.to_perfetto(args.output)
    if args.json:
        print_json({"output": args.output, **timeline.summary().model_dump(mode="json")})
    else:
        print(f"written to {args.output}")
    return OK
