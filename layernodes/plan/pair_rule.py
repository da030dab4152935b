"""What a trainer's user may give for an order, as a rule: which pair schedule any two chunks that meet run by."""

from __future__ import annotations

from collections.abc import Callable
from os import PathLike
from typing import Final

from layernodes.errors import ScheduleError
from layernodes.plan import pairs, schedules
from layernodes.plan.layer_plan import WgradMode
from layernodes.plan.schedule import PairSchedule, Schedule
from layernodes.plan.shape import ChunkShape
from layernodes.slots import Phase

PairRule = Callable[[ChunkShape | None, ChunkShape | None], PairSchedule]
"""Chooses the order of a forward chunk beside a backward chunk, given their shapes; either may be None."""


_PAIRS: Final = (
    "a trainer's loop takes a pair, F steps of microbatch 0 beside B and W steps of microbatch 1: make one with "
    "layernodes.pairs, optimize_pair, or layernodes optimize --pair"
)


def rule_of(order: str | PairRule | PairSchedule | PathLike[str], wgrad: WgradMode) -> PairRule:
    """The rule of a built-in's name, of a function, of a pair schedule or a file with one; see ``megatron.schedule``.

    Raises:
        ScheduleError: an unknown name, or a schedule of microbatches where a pair is wanted.
    """
    if callable(order):
        whole = [name for name, function in schedules.BUILT_IN.items() if id(function) == id(order)]
        if whole:
            raise ScheduleError(f"schedules.{whole[0]} orders all microbatches; {_PAIRS}")
        return order
    if isinstance(order, str) and order in pairs.BUILT_IN:
        rule = pairs.BUILT_IN[order]
        if wgrad is WgradMode.OFF:
            return rule

        def with_wgrad(forward: ChunkShape | None, backward: ChunkShape | None) -> PairSchedule:
            pair = rule(forward, backward)
            if backward is None or not any(backward.wgrad_slots):  # such as a chunk whose layers are all frozen
                return pair
            return pairs.deferred(pair, forward, backward, "first_layer_last")

        return with_wgrad
    if isinstance(order, PathLike) or (isinstance(order, str) and order.endswith((".txt", ".json"))):
        return _rule_of_pair(PairSchedule.load(order), str(order))
    if isinstance(order, PairSchedule | Schedule):
        return _rule_of_pair(order, "this schedule")
    raise ScheduleError(
        f"no pair schedule is called {order!r}; choose one of {', '.join(pairs.BUILT_IN)}, "
        f"give a function of the two shapes, a PairSchedule, or a .txt or .json file"
    )


def _rule_of_pair(whole: Schedule | PairSchedule, name: str) -> PairRule:
    forward = {step.microbatch for step in whole if step.phase is Phase.F}
    backward = {step.microbatch for step in whole if step.phase is Phase.B}
    if isinstance(whole, Schedule) or (forward and forward == backward):
        raise ScheduleError(f"{name} is one of whole microbatches; {_PAIRS}")
    return lambda forward, backward: _only(whole, forward, backward)


def _only(whole: PairSchedule, forward: ChunkShape | None, backward: ChunkShape | None) -> PairSchedule:
    """The steps of a pair for the chunks that are there: at a trainer's first and last microbatch only one is."""
    if forward is not None and backward is not None:
        return whole
    phases = "F" if backward is None else "BW"
    return PairSchedule(step for step in whole if step.phase in phases)
