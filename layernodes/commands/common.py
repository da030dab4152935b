"""What the subcommands share: naming a schedule, a shape and costs."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from layernodes.command import UsageError, Write, add_mtp, add_wgrad
from layernodes.commands.implied import implied_shape, with_options
from layernodes.plan import pairs, schedules
from layernodes.plan.costs import CostModel
from layernodes.plan.explain import explain_foreign
from layernodes.plan.infer import rules_of_shape
from layernodes.plan.perfetto import is_trace
from layernodes.plan.presets import PRESETS, preset
from layernodes.plan.retrace import rules_of, with_shape
from layernodes.plan.retrace import schedule_of as schedule_of_timeline
from layernodes.plan.schedule import PairSchedule, Schedule
from layernodes.plan.shape import ChunkShape
from layernodes.plan.simulate import simulate
from layernodes.plan.timeline import Timeline
from layernodes.plan.validate import find_violations
from layernodes.plan.wgrad import WgradPlace

_EARLY = "combined_1f1b_early_release"
SCHEDULES = (*schedules.BUILT_IN, _EARLY)
"""The built-in schedules that a command line can name."""
_MOST_LAYERS = 10_000
_NOT_GIVEN = {"layers": None, "mtp": 0, "wgrad": "off", "split_combine": False, "no_ends": False}
"""The options of a shape, each with its value where it is not given."""


def add_timeline(parser: argparse.ArgumentParser) -> None:
    """The arguments that name a timeline: a trace, or a schedule and what its steps cost."""
    add_schedule(parser, also="a trace of a run (layernodes run --trace FILE)")
    add_costs(parser, required=False)


def add_schedule(parser: argparse.ArgumentParser, *, also: str = "") -> None:
    """The argument that names a schedule, or ``also`` something else, and those of the shape of built-in ones."""
    parser.add_argument(
        "schedule",
        help=f"{also}{', ' * bool(also)}a .txt or .json file, or a built-in schedule: {', '.join(SCHEDULES)}",
        metavar="SCHEDULE",
    )
    add_shape(parser)
    add_wgrad_place(parser)


def add_wgrad_place(parser: argparse.ArgumentParser) -> None:
    """Where a built-in schedule puts its ``W`` steps."""
    parser.add_argument(
        "--wgrad-place",
        choices=[str(place) for place in WgradPlace],
        help="where a built-in schedule puts deferred weight gradients (default: after_b)",
    )


def add_shape(parser: argparse.ArgumentParser) -> None:
    """The arguments that describe a chunk."""
    parser.add_argument(
        "--layers",
        metavar="N|KINDS",
        help="number of MoE layers, or kinds such as 'dense*3,moe*58' (default: the preset's, else 4)",
    )
    add_mtp(parser)
    parser.add_argument(
        "--microbatches", type=int, default=2, metavar="N", help="number of microbatches (default: %(default)s)"
    )
    add_wgrad(parser)
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
    check_counts(args)
    named = vars(args).get("costs")
    if args.layers is None and isinstance(named, str) and named in PRESETS:
        kinds = [layer.kind for layer in PRESETS[named].shape().layers]
    else:
        kinds = _kinds(args.layers or "4")
    if not kinds and not args.mtp:
        raise UsageError(f"--layers {args.layers} leaves no layer; give 1 or more")
    return ChunkShape.of(
        kinds,
        mtp=args.mtp,
        pre_process=not args.no_ends,
        post_process=not args.no_ends,
        wgrad=args.wgrad == "auto",
        split_combine=args.split_combine,
    )


def check_counts(args: argparse.Namespace) -> None:
    """Raise UsageError where there are no microbatches, or fewer MTP layers than none."""
    if args.microbatches < 1:
        raise UsageError(f"--microbatches is {args.microbatches}; give 1 or more")
    if args.mtp < 0:
        raise UsageError(f"--mtp is {args.mtp}; give 0 or more")


def schedule_of(args: argparse.Namespace) -> Schedule | PairSchedule:
    """The schedule that the arguments name: a built-in one for their shape, or a file.

    Raises:
        UsageError, PlanError: they name none.
    """
    check_counts(args)
    check_schedule(args)
    if args.schedule not in SCHEDULES:
        return (PairSchedule if args.pair else Schedule).load(args.schedule)
    shape = shape_of(args)
    if not args.pair:
        return built_in(args.schedule, shape, args.microbatches, args.wgrad_place)
    early = args.schedule == _EARLY
    name = "combined_1f1b" if early else args.schedule
    if name not in pairs.BUILT_IN:
        raise UsageError(f"{name} has no pair form; choose one of {', '.join(pairs.BUILT_IN)}")
    pair = pairs.BUILT_IN["early_release" if early else name](shape, shape)
    return pair if args.wgrad_place is None else pairs.deferred(pair, shape, shape, args.wgrad_place)


def check_schedule(args: argparse.Namespace) -> None:
    """Raise UsageError where the schedule is no built-in one and no file, or ``--wgrad-place`` does not fit it."""
    name, place = args.schedule, args.wgrad_place
    if name not in SCHEDULES:
        if not Path(name).suffix:
            raise UsageError(
                f"{name!r} is neither a built-in schedule ({', '.join(SCHEDULES)}) nor a .txt or .json file"
            )
        if not Path(name).is_file():
            raise UsageError(f"there is no file {name}")
        if place is not None:
            raise UsageError(
                f"--wgrad-place is {place}, but {name} says where its W steps are; leave --wgrad-place out"
            )
    elif place is not None and args.wgrad == "off":
        raise UsageError(f"--wgrad-place is {place}, but nothing is deferred; add --wgrad auto")


def built_in(name: str, shape: ChunkShape, num_microbatches: int, place: str | None) -> Schedule:
    """The built-in schedule of this name; ``place`` is of its ``W`` steps, None: directly after their ``B``."""
    if name == _EARLY:
        schedule = schedules.combined_1f1b(shape, num_microbatches, early_release=True)
    else:
        schedule = schedules.BUILT_IN[name](shape, num_microbatches)
    return schedule if place is None else schedules.deferred(schedule, shape, place)


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


def timeline_of(args: argparse.Namespace, *, uses_costs: bool = False) -> Timeline:
    """The timeline of a trace, or the simulated one of a schedule.

    A built-in schedule's shape is that of the options. A file's or a trace's is read off its steps, but for what the
    options say of it.

    Args:
        args: what the command was given.
        uses_costs: whether the command has a use for the costs of a trace.

    Raises:
        UsageError: a schedule without costs, a trace with them, whose steps took what it says, or options that do not
            fit the steps.
    """
    if is_trace_file(args.schedule):
        if args.costs is not None and not uses_costs:
            raise UsageError(
                f"{args.schedule} is a trace of a run, which says what its steps took; leave --costs out, or name the "
                f"schedule to simulate in its place"
            )
        if args.wgrad_place is not None:
            raise UsageError(
                f"{args.schedule} is a trace of a run, whose W steps have their place; leave --wgrad-place out"
            )
        timeline = Timeline.from_perfetto(Path(args.schedule))
        return with_shape(timeline, _given_shape(schedule_of_timeline(timeline), args))
    schedule = schedule_of(args)
    if args.costs is None:
        raise UsageError(f"{args.schedule} is a schedule and no trace of a run; say with --costs what its steps cost")
    return simulate(schedule, costs_of(args), _given_shape(schedule, args))


def _given_shape(schedule: Schedule | PairSchedule, args: argparse.Namespace) -> ChunkShape | None:
    """The shape that the options describe, with what they do not say read off the steps; None where they say nothing.

    Raises:
        UsageError: the steps do not fit it.
    """
    if args.schedule in SCHEDULES:
        return shape_of(args)
    given = {name for name, value in _NOT_GIVEN.items() if getattr(args, name) != value}
    if not given:
        return None
    if "layers" in given:
        given.add("mtp")  # together they say which layers there are
    implied = [option for option in implied_shape(schedule, shape_of(args), args) if option.name not in given]
    shape = shape_of(with_options(args, implied))
    rules = rules_of_shape(schedule, shape)
    for position, step in enumerate(schedule):
        if step not in rules.ids:
            raise UsageError(
                f"the steps of {args.schedule} do not fit the options, which say {shape}: "
                f"{explain_foreign(step, position, rules)[0].message}. Say with --layers, --mtp, --wgrad, "
                f"--split-combine and --no-ends what it is for, or leave them out"
            )
    return shape


def gaps_of(timeline: Timeline) -> str:
    """What to print below the figures of a timeline that is of a part of a schedule; empty where it is of a whole."""
    missing = find_violations(schedule_of_timeline(timeline).steps, rules_of(timeline))
    if not missing:
        return ""
    more = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
    return f"\nthis is no whole schedule, and cannot be run: {missing[0].message}{more}; layernodes check shows where"


def is_trace_file(name: str) -> bool:
    """Whether this is the name of a file that holds a trace of a timeline."""
    path = Path(name)
    return path.suffix == ".json" and path.is_file() and is_trace(path.read_text(encoding="utf-8", errors="replace"))


def check_output(name: str, path: str | None, *, endings: Sequence[str] = ()) -> None:
    """Raise UsageError, before anything runs, where a file that is to be written has no folder, or another ending."""
    if path is None:
        return
    if not Path(path).absolute().parent.is_dir():
        raise UsageError(f"--{name} is {path}, and there is no such folder; make it first")
    if endings and Path(path).suffix.lower() not in endings:
        raise UsageError(f"--{name} is {path}; name it {', '.join(endings[:-1])} or {endings[-1]}")


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
