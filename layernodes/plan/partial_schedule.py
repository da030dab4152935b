"""Partial schedules, which a search over orders grows by one step at a time, and which of them are worth keeping.

Used by ``beam``, which states the contract.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

# Choices: a line's number, or the number of lines plus a class's number.
Trail = tuple["Trail", int] | None


@final
@dataclass(frozen=True, slots=True)
class State:
    """One partial schedule: the steps launched, and the moments at which streams and lines are free."""

    positions: tuple[int, ...]
    pending: tuple[int, ...]
    compute_free: float
    comm_free: float
    ready: tuple[float, ...]
    launched: float
    compute_left: float
    comm_left: float
    held: int
    trail: Trail


def add(front: list[State], state: State) -> None:
    """Add a state to those with the same steps, unless one is nowhere later; drop those that are nowhere earlier."""
    for other in front:
        if _no_later(other, state):
            return
    front[:] = [other for other in front if not _no_later(state, other)]
    front.append(state)


def _no_later(a: State, b: State) -> bool:
    return (
        a.compute_free <= b.compute_free
        and a.comm_free <= b.comm_free
        and a.launched <= b.launched
        and all(x <= y for x, y in zip(a.ready, b.ready, strict=True))
    )
