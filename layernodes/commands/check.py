"""``layernodes check``: says whether a schedule in a file is valid, and if not, everything that is wrong with it."""

from __future__ import annotations

import json
from argparse import ArgumentParser, Namespace
from dataclasses import asdict
from pathlib import Path
from typing import Final

from layernodes.command import Command, UsageError, Write
from layernodes.commands.shapes import add_shape_arguments, shape_of
from layernodes.errors import ScheduleError
from layernodes.plan.schedule import Schedule
from layernodes.plan.validate import validate


def _add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("file", type=Path, metavar="FILE", help="a schedule, .txt or .json")
    add_shape_arguments(parser)
    parser.add_argument("--forward-only", action="store_true", help="the schedule has no backward")
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def _run(options: Namespace, write: Write) -> int:
    if not options.file.is_file():
        raise UsageError(f"there is no file {options.file}")
    shape = shape_of(options)
    error: ScheduleError | None = None
    steps = 0
    try:
        schedule = Schedule.load(options.file)
        steps = len(schedule)
        validate(schedule, shape, options.microbatches, "forward" if options.forward_only else "train")
    except ScheduleError as found:
        error = found
    if options.json:
        violations = [] if error is None else [asdict(violation) for violation in error.violations]
        report = {"valid": error is None, "steps": steps, "error": error and str(error), "violations": violations}
        write(json.dumps(report, indent=2))
    elif error is None:
        write(f"valid: {steps} steps, {options.microbatches} microbatches over {shape}")
    else:
        write(f"not valid for {options.microbatches} microbatches over {shape}\n\n{error}")
    return 0 if error is None else 1


CHECK: Final = Command(
    name="check",
    summary="say whether a schedule in a file is valid, and if not, everything that is wrong with it",
    add_arguments=_add_arguments,
    run=_run,
)
