"""``layernodes plot``: a predicted or measured timeline as a picture (needs ``layernodes[plot]``)."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from typing import Final

from layernodes.command import Command, Write
from layernodes.commands.common import add_json, add_timeline, check_output, timeline_of, write_json
from layernodes.plan.file_kinds import PICTURE_ENDINGS


def _add_arguments(parser: ArgumentParser) -> None:
    add_timeline(parser)
    parser.add_argument("-o", "--output", default="timeline.png", metavar="FILE", help="default: %(default)s")
    parser.add_argument("--title", help="a line above the picture (default: the schedule)")
    add_json(parser)


def _run(args: Namespace, write: Write) -> int:
    """Get the timeline, and write the file."""
    check_output("output", args.output, endings=PICTURE_ENDINGS)
    timeline = timeline_of(args)
    timeline.plot(args.output, title=args.title or args.schedule)
    if args.json:
        write_json(write, {"output": args.output, **timeline.summary().model_dump(mode="json")})
    else:
        write(f"written to {args.output}")
    return 0


PLOT: Final = Command(
    name="plot",
    summary="draw a predicted or measured timeline (needs layernodes[plot])",
    add_arguments=_add_arguments,
    run=_run,
)
