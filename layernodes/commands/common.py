"""What the subcommands share: naming a schedule, a shape and costs."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from layernodes.command import UsageError, Write
from layernodes.plan import pairs, schedules
from layernodes.plan.costs import CostModel
from layernodes.plan.perfetto import is_trace
from layernodes.plan.presets import PRESETS, preset
from layernodes.plan.schedule import PairSchedule, Schedule
from layernodes.plan.shape import ChunkShape
from layernodes.plan.simulate import simulate
from layernodes.plan.timeline import Timeline
from layernodes.plan.wgrad import WgradPlace

_EARLY = "combined_1f1b_early_release"
_NAMES = (*schedules.BUILT_IN, _EARLY)
_MOST_LAYERS = 10_000


def add_timeline(parser: argparse.ArgumentParser) -> None:
    """The arguments that name a timeline: a trace, or a schedule and what its steps cost."""
    add_schedule(parser, also="a trace of a run (layernodes run --trace FILE)")
    add_costs(parser, required=False)


def add_schedule(parser: argparse.ArgumentParser, *, also: str = "") -> None:
    """The argument that names a schedule, or ``also`` something else, and those of the shape of built-in ones."""
    parser.add_argument(
        "schedule",
        help=f"{also}{', ' * bool(also)}a .txt or .json file, or a built-in schedule: {', '.join(_NAMES)}",
        metavar="SCHEDULE",
    )
    add_shape(parser)
    parser.add_argument(
        "--wgrad-place",
        choices=[str(place) for place in WgradPlace],
        help="where a built-in schedule puts deferred weight gradients (default: after_b)",
    )


def add_shape(parser: argparse.ArgumentParser) -> None:
    """The arguments that describe a chunk."""
    parser.add_argument(
        "--layers",
        help="number of MoE layers, or kinds such as 'dense*3,moe*58' (default: the preset's, else 4)",
    )
    parser.add_argument("--mtp", type=int, default=0, metavar="N", help="number of MTP layers after them (default: 0)")
    parser.add_argument(
        "--microbatches", type=int, default=2, metavar="M", help="number of microbatches (default: %(default)s)"
    )
    parser.add_argument("--wgrad", action="store_true", help="weight gradients are deferred (W steps)")
    parser.add_argument("--split-combine", action="store_true", help="layers have the slot post_combine")
    parser.add_argument("--no-ends", action="store_true", help="the chunk has neither pre_process nor post_process")
    parser.add_argument("--pair", action="store_true", help="a forward beside a backward, instead of microbatches")


def add_costs(parser: argparse.ArgumentParser, *, required: bool = True) -> None:
    """The argument that names costs."""
    parser.add_argument(
        "--costs",
        required=required,
        metavar="COSTS",
        help=f"a JSON file (layernodes profile writes one), or a preset: {', '.join(PRESETS)}",
    )


def add_json(parser: argparse.ArgumentParser) -> None:
    """The switch to JSON output."""
    parser.add_argument("--json", action="store_true", help="print JSON")


def shape_of(args: argparse.Namespace) -> ChunkShape:
    """The shape that the arguments describe.

    Raises:
        UsageError, PlanError: they describe none.
    """
    named = vars(args).get("costs")
    if args.layers is None and isinstance(named, str) and named in PRESETS:
        kinds = [layer.kind for layer in PRESETS[named].shape().layers]
    else:
        kinds = _kinds(args.layers or "4")
    return ChunkShape.of(
        kinds,
        mtp=args.mtp,
        pre_process=not args.no_ends,
        post_process=not args.no_ends,
        wgrad=args.wgrad,
        split_combine=args.split_combine,
    )


def schedule_of(args: argparse.Namespace) -> Schedule | PairSchedule:
    """The schedule that the arguments name: a built-in one for their shape, or a file.

    Raises:
        UsageError, PlanError: they name none.
    """
    if args.schedule not in _NAMES:
        if not Path(args.schedule).suffix:
            raise UsageError(
                f"{args.schedule!r} is neither a built-in schedule ({', '.join(_NAMES)}) nor a .txt or .json file"
            )
        if not Path(args.schedule).is_file():
            raise UsageError(f"there is no file {args.schedule}")
        return (PairSchedule if args.pair else Schedule).load(args.schedule)
    shape = shape_of(args)
    if args.wgrad_place is not None and not args.wgrad:
        raise UsageError(f"--wgrad-place is {args.wgrad_place}, but nothing is deferred; add --wgrad")
    if args.microbatches < 1:
        raise UsageError(f"--microbatches is {args.microbatches}; give 1 or more")
    early = args.schedule == _EARLY
    name = "combined_1f1b" if early else args.schedule
    if args.pair:
        if name not in pairs.BUILT_IN:
            raise UsageError(f"{name} has no pair form; choose one of {', '.join(pairs.BUILT_IN)}")
        build = pairs.BUILT_IN[name]
        pair = pairs.combined_1f1b(shape, shape, early_release=True) if early else build(shape, shape)
        return pair if args.wgrad_place is None else pairs.deferred(pair, shape, shape, args.wgrad_place)
    count = args.microbatches
    built = (
        schedules.combined_1f1b(shape, count, early_release=True) if early else schedules.BUILT_IN[name](shape, count)
    )
    return built if args.wgrad_place is None else schedules.deferred(built, shape, args.wgrad_place)


def costs_of(args: argparse.Namespace) -> CostModel:
    """The costs that the arguments name.

    Raises:
        CostError: they name none.
    """
    if args.costs in PRESETS or not Path(args.costs).suffix:
        return preset(args.costs).costs()
    if not Path(args.costs).is_file():
        raise UsageError(f"--costs: there is no file {args.costs}")
    return CostModel.load(args.costs)


def timeline_of(args: argparse.Namespace) -> Timeline:
    """The timeline of a trace, or the simulated one of a schedule.

    A file's shape is read off its steps, and a preset's layers' kinds.

    Raises:
        UsageError: a schedule without costs.
    """
    if is_trace_file(args.schedule):
        return Timeline.from_perfetto(Path(args.schedule))
    schedule = schedule_of(args)
    if args.costs is None:
        raise UsageError(f"{args.schedule} is a schedule and no trace of a run; say with --costs what its steps cost")
    return simulate(schedule, costs_of(args))


def is_trace_file(name: str) -> bool:
    """Whether this is the name of a file that holds a trace of a timeline."""
    path = Path(name)
    return path.suffix == ".json" and path.is_file() and is_trace(path.read_text(encoding="utf-8", errors="replace"))


def check_folder(name: str, path: str | None) -> None:
    """Raise UsageError, before anything runs, where a file that is to be written has no folder."""
    if path is not None and not Path(path).absolute().parent.is_dir():
        raise UsageError(f"--{name} is {path}, and there is no such folder; make it first")


def write_json(write: Write, value: object) -> None:
    """Write a value as JSON."""
    write(json.dumps(value, indent=2))


def _kinds(text: str) -> list[str]:
    """The kinds of layers in ``4`` or ``dense*3,moe``."""
    kinds: list[str] = []
    for part in text.split(","):
        kind, _, count = part.strip().partition("*") if not part.strip().isdecimal() else ("moe", "*", part.strip())
        if kind not in ("moe", "dense") or (count and not count.isdecimal()):
            raise UsageError(f"--layers {text}: {part!r} is no count and no kind; give '4' or 'dense*3,moe*58'")
        if len(kinds) + int(count or 1) > _MOST_LAYERS:
            raise UsageError(f"--layers {text}: more than {_MOST_LAYERS} layers")
        kinds += [kind] * int(count or 1)
    return kinds
