"""``layernodes check``: whether a schedule may run on a chunk, and if not, everything that is wrong with it."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import groupby
from typing import Final

from layernodes.command import Command, Write
from layernodes.commands.common import add_json, add_schedule, schedule_of, shape_of, write_json
from layernodes.commands.implied import Implied, implied_options, with_options
from layernodes.errors import Violation
from layernodes.plan.rules import Mode, Rules
from layernodes.plan.schedule import PairSchedule, Schedule
from layernodes.plan.validate import draw_violations, find_violations
from layernodes.slots import Phase

_FEW: Final = 10
_EXAMPLES: Final = 3


def _add_arguments(parser: ArgumentParser) -> None:
    add_schedule(parser)
    parser.add_argument("--forward", action="store_true", help="the schedule is forward only")
    parser.add_argument("--all", action="store_true", help="list every violation, where there are many")
    add_json(parser)


def _run(args: Namespace, write: Write) -> int:
    """Validate; 1 if the schedule is invalid."""
    schedule = schedule_of(args)
    rules = _rules(schedule, args)
    violations = find_violations(schedule.steps, rules)
    implied = implied_options(schedule, shape_of(args), args) if violations else []
    if args.json:
        found = [asdict(violation) for violation in violations]
        advice = [one.advice for one in implied]
        write_json(write, {"valid": not violations, "violations": found, "advice": advice})
    elif not violations:
        write(f"valid: {len(schedule)} steps for {_what(schedule, args)}")
    else:
        head = f"invalid for {_what(schedule, args)}: {_count(violations)}"
        write("\n".join([head, *_report(schedule, args, rules, violations, implied)]))
    return 1 if violations else 0


def _rules(schedule: Schedule | PairSchedule, args: Namespace) -> Rules:
    shape = shape_of(args)
    if args.pair:
        phases = {step.phase for step in schedule}
        return Rules.of_pair(shape if Phase.F in phases else None, shape if phases - {Phase.F} or not phases else None)
    forward = args.forward or args.schedule == "forward_only"
    return Rules.of(shape, args.microbatches, Mode.FORWARD if forward else Mode.TRAIN)


def _what(schedule: Schedule | PairSchedule, args: Namespace) -> str:
    what = "pair" if args.pair else f"{args.microbatches} microbatch{'es' * (args.microbatches != 1)}"
    return f"{shape_of(args)}, {what}"


def _count(violations: Sequence[Violation]) -> str:
    return f"{len(violations)} violation{'s' * (len(violations) > 1)}"


def _report(
    schedule: Schedule | PairSchedule,
    args: Namespace,
    rules: Rules,
    violations: Sequence[Violation],
    implied: Sequence[Implied],
) -> Iterator[str]:
    """What is wrong: first what the options miss, in a line each, then what is left with them."""
    yield from (f"  {one}" for one in implied)
    if implied and not args.all:
        fitting = with_options(args, implied)
        rules = _rules(schedule, fitting)
        violations = find_violations(schedule.steps, rules)
        if not violations:
            yield f"so it is valid, for {_what(schedule, fitting)}"
            return
        yield f"so, for {_what(schedule, fitting)}, {_count(violations)}:"
    yield from _listed(violations, everything=args.all)
    yield draw_violations(schedule.steps, rules, violations, at_most=_EXAMPLES)


def _listed(violations: Sequence[Violation], *, everything: bool) -> Iterator[str]:
    """The violations, or where they are many, by rule: how many, and the first of them."""
    if everything or len(violations) <= _FEW:
        yield from (f"  {violation.message}" for violation in violations)
        return
    for rule, group in groupby(sorted(violations, key=lambda violation: violation.rule), lambda one: one.rule):
        found = list(group)
        yield f"  {rule.replace('_', ' ')}: {_count(found)}"
        yield from (f"    {violation.message}" for violation in found[:_EXAMPLES])
        if len(found) > _EXAMPLES:
            yield f"    and {len(found) - _EXAMPLES} more"
    yield "  list all with --all"


CHECK: Final = Command(
    name="check",
    summary="say whether a schedule is valid, and if not, everything that is wrong with it",
    add_arguments=_add_arguments,
    run=_run,
)
