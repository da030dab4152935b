"""``layernodes show``: draws a schedule, one row a step, one column a stream."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from typing import Final

from layernodes.command import Command, Write
from layernodes.commands.run import load_schedule
from layernodes.commands.shapes import add_shape_arguments, shape_of
from layernodes.plan.wgrad import WgradPlace


def _add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("schedule", metavar="NAME|FILE", help="a built-in schedule, or a .txt or .json file")
    add_shape_arguments(parser)
    places = [str(place) for place in WgradPlace]
    parser.add_argument("--wgrad-place", choices=places, default="after_b", help="where a built-in puts its W steps")
    parser.add_argument("--text", action="store_true", help="print the steps, as a file would hold them")
    parser.add_argument("--json", action="store_true", help="print the schedule as JSON")


def _run(options: Namespace, write: Write) -> int:
    shape = shape_of(options)
    schedule = load_schedule(options.schedule, shape, options.microbatches, WgradPlace(options.wgrad_place))
    write(schedule.to_json() if options.json else str(schedule) if options.text else schedule.grid(shape))
    return 0


SHOW: Final = Command(
    name="show",
    summary="draw a schedule, one row a step, one column a stream",
    add_arguments=_add_arguments,
    run=_run,
)
