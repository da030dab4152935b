"""``layernodes show``: draws a schedule, one row a step, one column a stream."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from typing import Final

from layernodes.command import Command, Write
from layernodes.commands.common import add_json, add_schedule, schedule_of
from layernodes.plan.infer import infer_shape


def _add_arguments(parser: ArgumentParser) -> None:
    add_schedule(parser)
    parser.add_argument("--steps", action="store_true", help="print the steps, as a file would hold them")
    add_json(parser)


def _run(options: Namespace, write: Write) -> int:
    schedule = schedule_of(options)
    if options.json:
        write(schedule.to_json())
    elif options.steps:
        write(str(schedule))
    else:
        count = len({step.microbatch for step in schedule})
        write(f"{infer_shape(schedule)}; {count} microbatch{'es' * (count != 1)}, {len(schedule)} steps")
        write(schedule.grid())
    return 0


SHOW: Final = Command(
    name="show",
    summary="draw a schedule, one row a step, one column a stream",
    add_arguments=_add_arguments,
    run=_run,
)
