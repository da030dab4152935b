"""Where the random numbers of a step come from.

Generators are one resource of the whole process, so steps that touch them run in the schedule's order and never two at
once; the program sees to that. Within that, two modes:

    plain      nothing is done: generators are drawn from in the order in which steps run, as Megatron-Core does
    per_step   before a forward step, each generator gets the state that follows from
                   sha256(digest of all states at the start of the run, microbatch, layer, slot, generator's name)
               and after the run the one of a step "end", so that every valid order draws the same numbers and leaves
               the same states behind

Ranks whose states differ at the start (data or expert parallel) differ in every step, and ranks whose states are equal
(tensor parallel) agree, per generator: the digest is taken of each generator's own state.
"""

from __future__ import annotations

import hashlib
from enum import StrEnum
from typing import NoReturn, final

from layernodes._megatron.rng import Generators
from layernodes.plan.arguments import refuse_option
from layernodes.plan.step import Step


class RngMode(StrEnum):
    """How random numbers are drawn: ``plain`` in the order of the steps, ``per_step`` from the step's own name."""

    PLAIN = "plain"
    PER_STEP = "per_step"

    @classmethod
    def _missing_(cls, value: object) -> NoReturn:
        refuse_option("rng", value, cls)


@final
class StepGenerators:
    """The generators of one run in mode ``per_step``."""

    def __init__(self) -> None:
        self._generators = Generators()
        self._digests = {
            name: hashlib.sha256(state.numpy(force=True).tobytes()).digest()
            for name, state in self._generators.states().items()
        }

    def enter(self, step: Step) -> None:
        """Put every generator where this forward step finds it in any order."""
        self._seed(f"{step.microbatch}.{step.layer}.{step.slot}")

    def leave(self) -> None:
        """Put every generator where the run leaves it."""
        self._seed("end")

    def _seed(self, place: str) -> None:
        self._generators.seed(lambda name: self._seed_of(name, place))

    def _seed_of(self, name: str, place: str) -> int:
        start = self._digests.get(name, b"")
        found = hashlib.sha256(start + f"/{name}/{place}".encode()).digest()
        return int.from_bytes(found[:8], "little") >> 1
