"""Says whether a schedule is valid, before anything runs, and if not, everything that is wrong with it.

Contract: linear in the number of steps; a fault is reported once, at the step that is out of place, without the
faults that only follow from it::

    for each step:               no id in the rules: why it is foreign;   id seen before: duplicate
    for each id in order:        a predecessor stands later: order
    for each required id:        not seen: missing
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from layernodes.errors import ScheduleError, Violation
from layernodes.plan.arguments import check_argument
from layernodes.plan.explain import explain_foreign
from layernodes.plan.grid import render
from layernodes.plan.rules import NONE, Mode, Rules
from layernodes.plan.schedule import PairSchedule, Schedule
from layernodes.plan.shape import ChunkShape
from layernodes.plan.step import Step
from layernodes.slots import Phase, StreamType

_MAX_LISTED = 20
_MAX_MARKED = 8


def validate(
    schedule: Schedule,
    shape: ChunkShape,
    num_microbatches: int | None = None,
    mode: Mode | Literal["train", "forward"] = Mode.TRAIN,
) -> None:
    """Check that a schedule may run on a chunk of this shape.

    Args:
        schedule: the schedule.
        shape: the chunk's shape.
        num_microbatches: how many microbatches there are, numbered from 0; None: as many as the schedule names.
        mode: ``"forward"`` for schedules without backward.

    Raises:
        ScheduleError: it may not; ``violations`` holds all faults, the text lists them and shows them in a grid.
    """
    check_argument("schedule", schedule, Schedule)
    if num_microbatches is None:
        num_microbatches = len({step.microbatch for step in schedule})
    check(schedule.steps, Rules.of(shape, num_microbatches, mode))


def validate_pair(schedule: PairSchedule, forward_shape: ChunkShape | None, backward_shape: ChunkShape | None) -> None:
    """Check that a pair schedule may run: ``F0`` on one chunk, ``B1`` and ``W1`` on another.

    Args:
        schedule: the schedule.
        forward_shape: shape of the chunk that goes forward, or None.
        backward_shape: shape of the chunk that goes backward, whose forward ran in an earlier call, or None.

    Raises:
        ScheduleError: it may not; ``violations`` holds all faults, the text lists them and shows them in a grid.
    """
    check_argument("schedule", schedule, PairSchedule)
    check(schedule.steps, Rules.of_pair(forward_shape, backward_shape))


def check(steps: Sequence[Step], rules: Rules) -> None:
    """Check steps against rules; for callers that hold the rules already.

    Raises:
        ScheduleError: as ``validate``.
    """
    violations = find_violations(steps, rules)
    if violations:
        raise ScheduleError(_report(steps, rules, violations), violations)


def check_part(steps: Sequence[Step], rules: Rules, *, but: str = "") -> None:
    """Check the steps of a schedule that need not be whole: each may stand where it does, whatever else is missing.

    Args:
        steps: the steps.
        rules: what they are checked against.
        but: what cannot be done otherwise, for the error.

    Raises:
        ScheduleError: one may not; ``violations`` holds all of them, the text the first.
    """
    violations = [violation for violation in find_violations(steps, rules) if violation.rule != "missing"]
    if violations:
        more = f" (and {len(violations) - 1} more, in .violations)" if len(violations) > 1 else ""
        raise ScheduleError(f"{but}{violations[0].message}{more}", violations)


def find_violations(steps: Sequence[Step], rules: Rules) -> list[Violation]:
    """All faults of a schedule: those at a step in order of position, then the missing steps."""
    positions = [NONE] * len(rules.steps)
    order: list[int] = []
    found: list[Violation] = []
    for position, step in enumerate(steps):
        number = rules.ids.get(step)
        if number is None:
            found += explain_foreign(step, position, rules)
        elif positions[number] != NONE:
            found.append(_duplicate(step, position, positions[number]))
        else:
            positions[number] = position
            order.append(number)
    for number, predecessors in zip(order, rules.predecessors(order), strict=True):
        for before in predecessors:
            if positions[before] > positions[number]:
                found.append(_misplaced(rules, number, before, positions))
    found.sort(key=_position)
    missing = [number for number in rules.required() if positions[number] == NONE]
    if missing:
        nearest = rules.nearest(order)
        found += [_missing(rules, number, nearest[number]) for number in missing]
    return found


def _position(violation: Violation) -> int:
    return NONE if violation.position is None else violation.position


def _duplicate(step: Step, position: int, first: int) -> Violation:
    message = f"{step} at step {position} stands at step {first} already; leave one of the two out"
    return Violation(rule="duplicate", step=str(step), position=position, other=str(step), message=message)


def _misplaced(rules: Rules, number: int, before: int, positions: Sequence[int]) -> Violation:
    step, other = rules.steps[number], rules.steps[before]
    if step.phase is Phase.W and other.phase is Phase.W:
        why = "; the Ws of a module run in the order of its Bs"
    elif step.phase is Phase.B and other.phase is Phase.F:
        why = "; a microbatch goes backward only after its whole forward"
    else:
        why = ""
    return Violation(
        rule="order",
        step=str(step),
        position=positions[number],
        other=str(other),
        message=f"{step} at step {positions[number]} runs before {other} (step {positions[before]}){why}",
    )


def _missing(rules: Rules, number: int, nearest: int) -> Violation:
    step = rules.steps[number]
    other = None if nearest == NONE else str(rules.steps[nearest])
    message = f"{step} is missing; add it " + ("first" if other is None else f"after {other}")
    if step.phase is Phase.W:
        message += ", or let schedules.deferred place it: the shape defers its weight gradients"
    return Violation(rule="missing", step=str(step), position=None, other=other, message=message)


def draw_violations(
    steps: Sequence[Step], rules: Rules, violations: Sequence[Violation], *, at_most: int = _MAX_MARKED
) -> str:
    """A grid of the steps around the first violations, each marked with what is wrong there.

    Args:
        steps, rules, violations: as for ``find_violations``.
        at_most: how many steps to mark.
    """
    if not steps:
        return "(the schedule is empty)"
    marks: dict[int, str] = {}
    texts = {str(step): position for position, step in reversed(list(enumerate(steps)))}
    for violation in violations:
        if violation.position is not None:
            marks.setdefault(violation.position, _note(violation))
        elif violation.other is not None:
            marks.setdefault(texts[violation.other], f"{violation.step} is missing after this")
        else:
            marks.setdefault(0, f"{violation.step} is missing before this")
        if len(marks) == at_most:
            break

    def stream_of(step: Step) -> StreamType:
        number = rules.ids.get(step, NONE)
        return StreamType.COMPUTE if number == NONE else rules.streams[number]

    return render(steps, stream_of=stream_of, marks=marks)


def _report(steps: Sequence[Step], rules: Rules, violations: Sequence[Violation]) -> str:
    """The text of the error: the violations, and a grid of the steps around the first of them."""
    listed = [violation.message for violation in violations[:_MAX_LISTED]]
    if len(violations) > _MAX_LISTED:
        listed.append(f"and {len(violations) - _MAX_LISTED} more, in .violations")
    head = listed[0] if len(listed) == 1 else f"{len(violations)} violations:\n  " + "\n  ".join(listed)
    return f"{head}\n{draw_violations(steps, rules, violations)}"


def _note(violation: Violation) -> str:
    if violation.rule == "order":
        return f"before {violation.other}"
    return violation.rule.replace("_", " ")
