"""``layernodes run``: a real model under a schedule of the user's choice, compared with the plain model."""

from __future__ import annotations

import re
from argparse import ArgumentParser, Namespace
from typing import Final

from pydantic import BaseModel, ConfigDict

from layernodes.command import Command, UsageError, Write, add_wgrad
from layernodes.commands.common import SCHEDULES, add_wgrad_place, built_in, check_output, check_schedule
from layernodes.commands.implied import Implied, implied_options
from layernodes.demo.command import add_model_arguments, settings_of
from layernodes.demo.compare import run_plain
from layernodes.demo.data import make_microbatches, read_text
from layernodes.demo.model import build_model
from layernodes.demo.report import Verdict, render_verdict
from layernodes.demo.run import agree
from layernodes.demo.runner_pass import run_schedule
from layernodes.demo.settings import DemoSettings, check_settings
from layernodes.demo.world import World, demo_world, num_launched_ranks
from layernodes.plan.chunk_plan import ChunkPlan
from layernodes.plan.file_kinds import PICTURE_ENDINGS
from layernodes.plan.rules import Mode, Rules
from layernodes.plan.runner import Runner
from layernodes.plan.schedule import Schedule
from layernodes.plan.shape import ChunkShape
from layernodes.plan.stream_kind import StreamKind
from layernodes.plan.validate import find_violations
from layernodes.slots import Phase

_LAYERS: Final = re.compile(r"moe(?:\*(\d+))?(,dense)?")


class RunReport(BaseModel):
    """What ``layernodes run --json`` prints.

    Attributes:
        schedule: its name or file. steps: how many it has. shape: the model's, in words.
        streams, wgrad: what it ran with.
        same_draws: whether the forwards run in the plain model's order, so that dropout draws the same masks.
        makespan: seconds from the first step's start to the last one's end, on rank 0.
        seconds_plain, seconds_run: wall time of each pass, on rank 0.
        verdict: whether everything was bit for bit equal, on every rank.
    """

    model_config = ConfigDict(frozen=True)

    schedule: str
    steps: int
    shape: str
    streams: str
    wgrad: str
    same_draws: bool
    makespan: float
    seconds_plain: float
    seconds_run: float
    verdict: Verdict


def _add_arguments(parser: ArgumentParser) -> None:
    add_model_arguments(parser)
    parser.add_argument(
        "schedule",
        nargs="?",
        metavar="SCHEDULE",
        help=f"a .txt or .json file, or a built-in schedule: {', '.join(SCHEDULES)} (default: combined_1f1b)",
    )
    parser.add_argument("--schedule", dest="named", metavar="NAME|FILE", help="the same, by name")
    add_chunk_arguments(parser)
    add_wgrad_place(parser)
    parser.add_argument("--trace", metavar="FILE", help="write what ran when, on rank 0, for ui.perfetto.dev")
    parser.add_argument("--plot", metavar="FILE", help="draw it as a .png, .svg or .pdf (needs layernodes[plot])")


def add_chunk_arguments(parser: ArgumentParser) -> None:
    """How the model is cut into slots and run, as ``layernodes profile`` has it too."""
    kinds = [str(kind) for kind in StreamKind]
    parser.add_argument("--streams", choices=kinds, default="auto", help="what the two streams are (default: auto)")
    add_wgrad(parser)
    parser.add_argument("--split-combine", action="store_true", help="give what follows combine a slot of its own")


def _run(options: Namespace, write: Write) -> int:
    settings = settings_of(options)
    check_settings(settings, num_ranks=num_launched_ranks())
    if options.schedule is not None and options.named is not None:
        raise UsageError(f"there are two schedules, {options.schedule} and --schedule {options.named}; name one")
    options.schedule = options.schedule or options.named or "combined_1f1b"
    check_schedule(options)
    check_output("trace", options.trace)
    check_output("plot", options.plot, endings=PICTURE_ENDINGS)
    text = read_text(settings.text)
    with demo_world() as world:
        report = _report(options, settings, text.content, world)
        if world.rank == 0:
            write(report.model_dump_json(indent=2) if options.json else _render(report))
        world.wait_for_all()
    return 0 if report.verdict.equal else 1


def _report(options: Namespace, settings: DemoSettings, content: bytes, world: World) -> RunReport:
    model = build_model(settings, num_ranks=world.num_ranks, device=world.device)
    microbatches = make_microbatches(
        content, settings.microbatches, rank=world.rank, num_ranks=world.num_ranks, device=world.device
    )
    chunk = ChunkPlan.build(model, split_combine=options.split_combine, wgrad=options.wgrad)
    if options.schedule in SCHEDULES:
        schedule = built_in(options.schedule, chunk.shape, settings.microbatches, options.wgrad_place)
    else:
        schedule = Schedule.load(options.schedule)
        _check_fits(schedule, chunk.shape, options)
    plain = run_plain(model, microbatches, settings.seed, lambda _: None)
    with Runner(options.streams) as runner:
        ours, result = run_schedule(model, microbatches, settings.seed, chunk, schedule, runner)
    if world.rank == 0:
        if options.trace:
            result.timeline.to_perfetto(options.trace)
        if options.plot:
            result.timeline.plot(options.plot, title=options.schedule)
    return RunReport(
        schedule=options.schedule,
        steps=len(schedule),
        shape=str(chunk.shape),
        streams=options.streams,
        wgrad=options.wgrad,
        same_draws=_draws_as_plain(schedule),
        makespan=result.timeline.makespan,
        seconds_plain=plain.seconds,
        seconds_run=ours.seconds,
        verdict=agree(plain, ours, world),
    )


def _check_fits(schedule: Schedule, shape: ChunkShape, options: Namespace) -> None:
    """Raise UsageError where a file's steps are those of another model than the options make, and say which."""
    mode = Mode.TRAIN if any(step.phase is not Phase.F for step in schedule) else Mode.FORWARD
    if not find_violations(schedule.steps, Rules.of(shape, options.microbatches, mode)):
        return
    given = Namespace(**{**vars(options), "pair": False, "forward": True, "no_ends": False})
    advice = [_advice(one) for one in implied_options(schedule, shape, given)]
    if advice:
        raise UsageError(f"{options.schedule} is for another model than this one, {shape}: {'; '.join(advice)}")


def _advice(one: Implied) -> str:
    """What to change, of what ``run`` has; ``check`` has more."""
    if one.name in ("pair", "no_ends"):
        return f"it has {one.reason}, and run takes whole microbatches of a whole model"
    if one.name != "layers":
        return str(one)
    found = _LAYERS.fullmatch(str(one.value))
    if found is None:
        return f"it has {one.reason}, and run's layers are moe, with --dense-last all but the last"
    dense = " --dense-last" if found[2] else ""
    return f"it has {one.reason}: say --layers {int(found[1] or 1) + bool(dense)}{dense}"


def _draws_as_plain(schedule: Schedule) -> bool:
    """Whether each microbatch goes forward after the whole of the one before."""
    forwards = [step.microbatch for step in schedule if step.phase is Phase.F]
    return forwards == sorted(forwards)


def _render(report: RunReport) -> str:
    lines = [
        f"schedule  {report.schedule}, {report.steps} steps",
        f"chunk     {report.shape}",
        f"streams   {report.streams}, weight gradients deferred: {report.wgrad}",
        f"time      plain {report.seconds_plain:.3f} s, scheduled {report.seconds_run:.3f} s",
        "",
        *render_verdict(report.verdict, num_ranks=num_launched_ranks()),
    ]
    if not report.verdict.equal and not report.same_draws:
        lines += [
            "",
            "This schedule weaves the forwards of microbatches, so dropout draws other masks than in the plain model,",
            "and the two differ however right the schedule is. To compare them, run it with --no-dropout.",
        ]
    return "\n".join(lines)


RUN: Final = Command(
    name="run",
    summary="run a Megatron-Core MoE model under a schedule and compare it with the plain model bit for bit",
    add_arguments=_add_arguments,
    run=_run,
)
