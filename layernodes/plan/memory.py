"""Live activations along a schedule.

Definition: memory is counted in the order in which steps are launched, since that is the order in which the host
allocates and frees, however far a device has come. Position by position, a step first acquires its bytes, then counts,
then releases what is no longer needed after it::

    F    acquires the slot's activation_bytes
    B    acquires wgrad_bytes if its W is deferred;   after it, activation_bytes are released
    W                                                 after it, wgrad_bytes are released

A ``B`` or ``W`` whose ``F`` or ``B`` is not in the timeline (a pair's backward chunk, part of a schedule) releases what
was there before the first step. A schedule without backward keeps nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

from layernodes.slots import Phase

if TYPE_CHECKING:
    from layernodes.plan.step import Step
    from layernodes.plan.timeline import Interval

_BEFORE = {Phase.B: Phase.F, Phase.W: Phase.B}


def live_bytes(intervals: Sequence[Interval]) -> list[int]:
    """Bytes of activations held while each step of a schedule is the one being launched."""
    return _running(
        [i.acquires for i in intervals],
        [i.releases for i in intervals],
        sum(i.releases for i in _without_cause(intervals)),
    )


def live_slots(intervals: Sequence[Interval]) -> list[int]:
    """The same, counting each slot of each microbatch as one from its ``F`` to its ``B``."""
    if all(i.step.phase is Phase.F for i in intervals):
        return [0] * len(intervals)
    return _running(
        [int(i.step.phase is Phase.F) for i in intervals],
        [int(i.step.phase is Phase.B) for i in intervals],
        sum(i.step.phase is Phase.B for i in _without_cause(intervals)),
    )


def _running(acquired: Sequence[int], released: Sequence[int], at_start: int) -> list[int]:
    held = accumulate(acquired, initial=at_start)
    gone = accumulate(released, initial=0)
    next(held)
    return [have - lost for have, lost in zip(held, gone, strict=False)]


def _without_cause(intervals: Sequence[Interval]) -> list[Interval]:
    """Intervals of the ``B``s and ``W``s that release what no step of the timeline acquired."""
    seen = {_key(i.step, i.step.phase) for i in intervals}
    return [i for i in intervals if i.step.phase in _BEFORE and _key(i.step, _BEFORE[i.step.phase]) not in seen]


def _key(step: Step, phase: Phase) -> tuple[Phase, int, int | None, str]:
    return phase, step.microbatch, step.layer, step.slot
