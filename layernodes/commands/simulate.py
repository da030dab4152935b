"""``layernodes simulate``: when each step would run, and what that adds up to."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from typing import Final

from layernodes.command import Command, Write
from layernodes.commands.common import add_json, add_timeline, gaps_of, timeline_of, write_json


def _add_arguments(parser: ArgumentParser) -> None:
    add_timeline(parser)
    parser.add_argument("--width", type=int, default=100, help="characters of the time axis (default: %(default)s)")
    add_json(parser)


def _run(args: Namespace, write: Write) -> int:
    """Get the timeline, and print the figures."""
    timeline = timeline_of(args)
    if args.json:
        write_json(write, timeline.summary().model_dump(mode="json"))
    else:
        write(timeline.gantt(args.width))
        write("")
        write(f"{timeline.summary()}{gaps_of(timeline)}")
    return 0


SIMULATE: Final = Command(
    name="simulate",
    summary="predict a schedule's timeline, or read a measured one, and what it adds up to",
    add_arguments=_add_arguments,
    run=_run,
)
