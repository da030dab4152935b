"""``layernodes show``: a schedule as a grid, one row a step, one column a stream."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from layernodes.commands.common import OK, add_json, add_schedule, in_words, plain, schedule_of, shown_shape

if TYPE_CHECKING:
    from layernodes.commands.common import Subparsers


def add_parser(subparsers: Subparsers) -> None:
    """Add the subcommand."""
    parser = subparsers.add_parser("show", help="print a schedule", description=plain(__doc__))
    add_schedule(parser)
    parser.add_argument("--text", action="store_true", help="print the text form, which can be saved and edited")
    add_json(parser)
    parser.set_defaults(run=run)


@in_words
def run(args: argparse.Namespace) -> int:
    """Print a schedule."""
    schedule = schedule_of(args)
    if args.json:
        print(schedule.to_json())
    elif args.text:
        print(schedule)
    else:
        print(shown_shape(schedule))
        print(schedule.grid())
    return OK
