"""What the steps of a schedule say of the chunk that they are for, where the options of a command say otherwise.

Contract: each option is read off the steps alone; whether the schedule is valid with them is for the rules to say.
Linear in the steps.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator, Sequence
from copy import copy
from itertools import groupby
from typing import NamedTuple, final

from layernodes.errors import ScheduleError
from layernodes.plan.infer import infer_shape
from layernodes.plan.schedule import PairSchedule, Schedule
from layernodes.plan.shape import ChunkShape
from layernodes.slots import Phase, Slot


@final
class Implied(NamedTuple):
    """One option that fits the steps.

    Attributes:
        reason: what the steps have, in words.
        advice: what to change on the command line.
        name, value: the option, as parsed.
    """

    reason: str
    advice: str
    name: str
    value: object

    def __str__(self) -> str:
        return f"it has {self.reason}: {self.advice}"


def implied_options(schedule: Schedule | PairSchedule, shape: ChunkShape, args: Namespace) -> list[Implied]:
    """The options that the steps imply and that are not as given.

    Args:
        schedule: the schedule.
        shape: the shape that the given options describe.
        args: the given options.
    """
    return [*_of_kind(schedule, args), *implied_shape(schedule, shape, args)] if len(schedule) else []


def with_options(args: Namespace, implied: Sequence[Implied]) -> Namespace:
    """The given options with the implied ones in their place."""
    changed = copy(args)
    for option in implied:
        setattr(changed, option.name, option.value)
    return changed


def _of_kind(schedule: Schedule | PairSchedule, args: Namespace) -> Iterator[Implied]:
    of_phase = {phase: {step.microbatch for step in schedule if step.phase is phase} for phase in Phase}
    backward = of_phase[Phase.B] | of_phase[Phase.W]
    if args.pair:
        return
    if of_phase[Phase.F] == {0} and backward == {1}:
        yield Implied("F of microbatch 0, and B of microbatch 1, as a pair has", "add --pair", "pair", True)
        return
    numbers = of_phase[Phase.F] | backward
    count = len(numbers)
    if count != args.microbatches and numbers == set(range(count)):
        reason = f"microbatches 0 to {count - 1}" if count > 1 else "microbatch 0 alone"
        yield Implied(reason, f"say --microbatches {count}", "microbatches", count)
    if not backward and not args.forward and args.schedule != "forward_only":
        yield Implied("forward steps alone", "add --forward if that is all it is for", "forward", True)


def implied_shape(schedule: Schedule | PairSchedule, shape: ChunkShape, args: Namespace) -> Iterator[Implied]:
    """Of ``implied_options`` those of the shape."""
    try:
        own = infer_shape(schedule)
    except ScheduleError:  # a number of a layer that is beyond all reason says nothing of the others
        return
    defers = any(own.wgrad_slots)
    if defers and args.wgrad == "off":
        yield Implied("W steps", "add --wgrad auto", "wgrad", "auto")
    elif not defers and args.wgrad == "auto" and any(step.phase is Phase.B for step in schedule):
        yield Implied("no W steps", "leave --wgrad out", "wgrad", "off")
    num_mtp = sum(layer.find(Slot.MTP_POST_PROCESS) is not None for layer in own.layers)
    if num_mtp > args.mtp:
        reason = f"steps of {Slot.MTP_POST_PROCESS}, in {num_mtp} layer{'s' * (num_mtp > 1)}"
        yield Implied(reason, f"say --mtp {num_mtp}", "mtp", num_mtp)
    num_mtp = max(num_mtp, args.mtp)
    kinds = [layer.kind for layer in own.layers[: max(0, own.num_layers - num_mtp)]]
    if kinds and "empty" not in kinds and kinds != [layer.kind for layer in shape.layers if not layer.mtp]:
        text = _spell(kinds)
        yield Implied(f"{len(kinds)} layer{'s' * (len(kinds) > 1)}, {text}", f"say --layers '{text}'", "layers", text)
    if any(layer.find(Slot.POST_COMBINE) for layer in own.layers) and not args.split_combine:
        yield Implied(f"steps of {Slot.POST_COMBINE}", "add --split-combine", "split_combine", True)
    if own.ends and args.no_ends:
        yield Implied(f"steps of {' and '.join(own.ends)}", "leave --no-ends out", "no_ends", False)
    elif not own.ends and not args.no_ends:
        yield Implied("no steps of pre_process and post_process", "add --no-ends", "no_ends", True)


def _spell(kinds: Sequence[str]) -> str:
    """The kinds of layers as ``--layers`` has them: ``dense*3,moe*58``."""
    counts = [(kind, len(list(group))) for kind, group in groupby(kinds)]
    return ",".join(f"{kind}*{count}" if count > 1 else kind for kind, count in counts)
