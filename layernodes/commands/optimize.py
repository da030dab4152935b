"""``layernodes optimize``: the best schedule for given costs, and how good it is."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from typing import Final

from layernodes.command import Command, NoAnswerError, UsageError, Write
from layernodes.commands.common import add_costs, add_json, add_shape, check_output, costs_of, shape_of, write_json
from layernodes.errors import ScheduleError
from layernodes.plan.file_kinds import SCHEDULE_ENDINGS
from layernodes.plan.optimize import optimize_pair_with_report, optimize_with_report
from layernodes.plan.optimized import Optimized, Progress
from layernodes.plan.schedule import PairSchedule, Schedule
from layernodes.plan.units import in_seconds


def _add_arguments(parser: ArgumentParser) -> None:
    add_shape(parser)
    add_costs(parser)
    parser.add_argument("--memory-limit", type=int, metavar="BYTES", help="bytes of live activations at most")
    parser.add_argument("--time-limit", type=float, metavar="SECONDS", help="return the best after this time")
    parser.add_argument("-o", "--output", metavar="FILE", help="write the schedule to this .txt or .json file")
    add_json(parser)


def _run(args: Namespace, write: Write) -> int:
    """Optimize, and print the report."""
    check_output("output", args.output, endings=SCHEDULE_ENDINGS)
    for name, limit in (("memory", args.memory_limit), ("time", args.time_limit)):
        if limit is not None and not limit >= 0:
            raise UsageError(f"--{name}-limit is {limit}; give 0 or more")
    shape, costs = shape_of(args), costs_of(args)
    is_terminal = sys.stderr.isatty()
    progress = _show if is_terminal else None
    found: Optimized[Schedule] | Optimized[PairSchedule]
    try:
        if args.pair:
            found = optimize_pair_with_report(
                shape,
                shape,
                costs,
                memory_limit=args.memory_limit,
                time_limit=args.time_limit,
                progress=progress,
            )
        else:
            found = optimize_with_report(
                shape,
                costs,
                num_microbatches=args.microbatches,
                memory_limit=args.memory_limit,
                time_limit=args.time_limit,
                progress=progress,
            )
    except ScheduleError as error:
        raise NoAnswerError(str(error)) from None
    finally:
        if is_terminal:
            print(f"\r{'':78}\r", end="", file=sys.stderr)
    if args.output:
        found.schedule.save(args.output)
    if args.json:
        write_json(
            write,
            {
                "makespan": found.makespan,
                "lower_bound": found.lower_bound,
                "gap": found.gap,
                "optimal": found.optimal,
                "peak_activation_bytes": found.peak_activation_bytes,
                "found_by": found.found_by,
                "candidates": dict(found.candidates),
                "num_states": found.num_states,
                "stopped_by": found.stopped_by,
                "steps": [str(step) for step in found.schedule],
            },
        )
        return 0
    write(str(found))
    for name, makespan in sorted(found.candidates.items(), key=lambda item: item[1])[:8]:
        slower = 100 * (makespan / found.makespan - 1) if found.makespan > 0 else 0.0
        write(f"  {name:<48} {in_seconds(makespan):>10}  +{slower:.2f} %")
    write(f"written to {args.output}" if args.output else "write it to a file with -o FILE")
    return 0


def _show(progress: Progress) -> None:
    """One line that is written over."""
    line = (
        f"{progress.seconds:6.1f} s  {progress.num_states:>9} states  best {in_seconds(progress.makespan)}  "
        f"bound {in_seconds(progress.lower_bound)}  gap {100 * progress.gap:.2f} %"
    )
    print(f"\r{line[:78]:78}", end="", file=sys.stderr, flush=True)


OPTIMIZE: Final = Command(
    name="optimize",
    summary="choose the best schedule for given costs, and say how good it is",
    add_arguments=_add_arguments,
    run=_run,
)
