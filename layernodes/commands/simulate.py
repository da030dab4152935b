"""``layernodes simulate``: when each step would run, and what that adds up to."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from layernodes.commands.common import OK, add_costs, add_json, add_schedule, in_words, plain, print_json, timeline_of

if TYPE_CHECKING:
    from layernodes.commands.common import Subparsers


def add_parser(subparsers: Subparsers) -> None:
    """Add the subcommand."""
    parser = subparsers.add_parser("simulate", help="predict a schedule's timeline", description=plain(__doc__))
    add_schedule(parser)
    add_costs(parser)
    parser.add_argument("--width", type=int, default=100, help="characters of the time axis (default: %(default)s)")
    add_json(parser)
    parser.set_defaults(run=run)


@in_words
def run(args: argparse.Namespace) -> int:
    """Simulate, and print the figures."""
    timeline = timeline_of(args)
    if args.json:
        print_json(timeline.summary().model_dump(mode="json"))
    else:
        print(timeline.gantt(args.width))
        print()
        print(timeline.summary())
    return OK
