"""``layernodes check``: whether a schedule may run on a chunk, and if not, everything that is wrong with it."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from dataclasses import asdict
from typing import Final

from layernodes.command import Command, Write
from layernodes.commands.common import add_json, add_schedule, schedule_of, shape_of, write_json
from layernodes.errors import ScheduleError
from layernodes.plan.schedule import PairSchedule
from layernodes.plan.validate import validate, validate_pair
from layernodes.slots import Phase


def _add_arguments(parser: ArgumentParser) -> None:
    add_schedule(parser)
    parser.add_argument("--forward", action="store_true", help="the schedule is forward only")
    add_json(parser)


def _run(args: Namespace, write: Write) -> int:
    """Validate; 1 if the schedule is invalid."""
    schedule, shape = schedule_of(args), shape_of(args)
    what = "pair" if isinstance(schedule, PairSchedule) else f"{args.microbatches} microbatches"
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
            write_json(write, {"valid": False, "violations": [asdict(violation) for violation in error.violations]})
        else:
            write(f"invalid for {shape}, {what}: {error}")
        return 1
    if args.json:
        write_json(write, {"valid": True, "violations": []})
    else:
        write(f"valid: {len(schedule)} steps for {shape}, {what}")
    return 0


CHECK: Final = Command(
    name="check",
    summary="say whether a schedule is valid, and if not, everything that is wrong with it",
    add_arguments=_add_arguments,
    run=_run,
)
