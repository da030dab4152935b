"""What an optimization tells: how far it has come, and the schedule that it chose."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import final

from layernodes.plan.schedule import PairSchedule, Schedule
from layernodes.plan.units import in_seconds


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """How far an optimization has come: seconds so far, states made, and the best makespan and bound so far."""

    seconds: float
    num_states: int
    makespan: float
    lower_bound: float

    @property
    def gap(self) -> float:
        """How far the makespan is above the bound, as a share of the bound."""
        return gap_of(self.makespan, self.lower_bound)


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Optimized[S: (Schedule, PairSchedule)]:
    """A chosen schedule, and how good it is.

    Attributes:
        schedule: the schedule.
        makespan: what ``simulate`` predicts for it.
        lower_bound: a makespan that no schedule of this shape can beat.
        optimal: whether it is proved best.
        peak_activation_bytes: see ``Timeline``.
        found_by: name of the candidate, or of the search, that it comes from.
        candidates: makespan of each ready-made candidate that fits into the memory limit, by name.
        num_states: states that the searches made.
        stopped_by: ``"optimal"``, ``"max_states"`` or ``"time_limit"``.
    """

    schedule: S
    makespan: float
    lower_bound: float
    optimal: bool
    peak_activation_bytes: int
    found_by: str
    candidates: Mapping[str, float]
    num_states: int
    stopped_by: str

    @property
    def gap(self) -> float:
        """How far the makespan is above the bound, as a share of the bound; 0 where it is proved best."""
        return gap_of(self.makespan, self.lower_bound)

    def __str__(self) -> str:
        """Two lines: the makespan with its bound, and where it comes from."""
        proof = "proved best" if self.optimal else f"at most {100 * self.gap:.2f} % above the best"
        best = min(self.candidates.items(), key=lambda item: item[1], default=None)
        beside = "" if best is None else f"; the best ready-made one is {best[0]} with {in_seconds(best[1])}"
        return (
            f"makespan {in_seconds(self.makespan)}, lower bound {in_seconds(self.lower_bound)}: {proof}\n"
            f"found by {self.found_by} after {self.num_states} states{beside}"
        )


def gap_of(makespan: float, bound: float) -> float:
    """How far a makespan is above a bound, as a share of the bound."""
    if makespan <= bound:
        return 0.0
    return makespan / bound - 1 if bound > 0 else float("inf")
