"""``layernodes check``: whether a schedule may run on a chunk, and if not, everything that is wrong with it."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from typing import TYPE_CHECKING

from layernodes.commands.common import (
    NO,
    OK,
    add_json,
    add_schedule,
    in_words,
    plain,
    print_json,
    schedule_of,
    shape_of,
)
from layernodes.errors import ScheduleError
from layernodes.plan.schedule import PairSchedule
from layernodes.plan.validate import validate, validate_pair
from layernodes.slots import Phase

if TYPE_CHECKING:
    from layernodes.commands.common import Subparsers


def add_parser(subparsers: Subparsers) -> None:
    """Add the subcommand."""
    parser = subparsers.add_parser("check", help="check a schedule", description=plain(__doc__))
    add_schedule(parser)
    parser.add_argument("--forward", action="store_true", help="the schedule is forward only")
    add_json(parser)
    parser.set_defaults(run=run)


@in_words
def run(args: argparse.Namespace) -> int:
    """Validate a schedule; 1 if it is invalid."""
    schedule, shape = schedule_of(args), shape_of(args)
    forward = args.forward or args.schedule == "forward_only"
    try:
        if isinstance(schedule, PairSchedule):
            phases = {step.phase for step in schedule}
            validate_pair(
                schedule, shape if Phase.F in phases else None, shape if phases - {Phase.F} or not phases else None
            )
        else:
            validate(schedule, shape, args.microbatches, mode="forward" if forward else "train")
    except ScheduleError as error:
        if args.json:
            print_json({"valid": False, "violations": [asdict(violation) for violation in error.violations]})
        else:
            print(f"invalid: {error}")
        return NO
    if args.json:
        print_json({"valid": True, "violations": []})
    else:
        what = "pair" if isinstance(schedule, PairSchedule) else f"{args.microbatches} microbatches"
        print(f"valid: {len(schedule)} steps for {shape}, {what}")
    return OK
