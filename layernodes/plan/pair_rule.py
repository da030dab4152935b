"""What a trainer's user may give for an order, as a rule: which pair schedule any two chunks that meet run by."""

from __future__ import annotations

from collections.abc import Callable
from os import PathLike

from layernodes.errors import ScheduleError
from layernodes.plan import pairs
from layernodes.plan.layer_plan import WgradMode
from layernodes.plan.schedule import PairSchedule
from layernodes.plan.shape import ChunkShape

PairRule = Callable[[ChunkShape | None, ChunkShape | None], PairSchedule]
"""Chooses the order of a forward chunk beside a backward chunk, given their shapes; either may be None."""


def rule_of(order: str | PairRule | PathLike[str], wgrad: WgradMode) -> PairRule:
    """The rule of a built-in's name, of a function, or of a file with a pair schedule; see ``megatron.schedule``.

    Raises:
        ScheduleError: an unknown name.
    """
    if callable(order):
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
        loaded = PairSchedule.load(order)
        return lambda forward, backward: _only(loaded, forward, backward)
    raise ScheduleError(
        f"no pair schedule is called {order!r}; choose one of {', '.join(pairs.BUILT_IN)}, give a function of the two "
        f"shapes, or a .txt or .json file"
    )


def _only(whole: PairSchedule, forward: ChunkShape | None, backward: ChunkShape | None) -> PairSchedule:
    """The steps of a pair for the chunks that are there: at a trainer's first and last microbatch only one is."""
    if forward is not None and backward is not None:
        return whole
    phases = "F" if backward is None else "BW"
    return PairSchedule(step for step in whole if step.phase in phases)
