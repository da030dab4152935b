"""The programs of the schedules that a runner has seen: each is checked and compiled once, for its chunks."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Final, final

from torch import Tensor

from layernodes.errors import ScheduleError
from layernodes.plan.chunk_plan import ChunkPlan
from layernodes.plan.program import Call, Program, compile_steps
from layernodes.plan.ranks import fingerprint
from layernodes.plan.rules import Mode, Rules
from layernodes.plan.schedule import PairSchedule, Schedule
from layernodes.plan.validate import check

MAX_COMPILED: Final = 256


@final
@dataclass(slots=True)
class Compiled:
    """A program, with what it was compiled from, kept so that the ids that it is filed under stay theirs.

    Attributes:
        program, fingerprint: the program, and what tells it from that of another rank.
        sources: the schedule and the chunks.
        is_watched: whether a run of it has shown on which streams its collectives are issued.
    """

    program: Program
    fingerprint: Tensor
    sources: tuple[object, ...]
    is_watched: bool = False


@final
class ProgramCache:
    """Compiles schedules, and keeps the latest programs.

    Args:
        post_forward_lane: the lane of a trainer's call after the forward pass; its other calls are on the compute lane.
    """

    def __init__(self, *, post_forward_lane: int) -> None:
        self._post_forward_lane = post_forward_lane
        self._compiled: dict[tuple[Hashable, ...], Compiled] = {}

    def clear(self) -> None:
        """Forget all programs."""
        self._compiled.clear()

    def of_schedule(self, schedule: Schedule, chunk: ChunkPlan, num_microbatches: int, mode: Mode) -> Compiled:
        """The program of a schedule over microbatches of one chunk.

        Raises:
            ScheduleError: the schedule is not valid for the chunk.
        """
        key = (id(schedule), id(chunk), num_microbatches)
        compiled = self._compiled.get(key)
        if compiled is None:
            rules = Rules.of(chunk.shape, num_microbatches, mode)
            try:
                check(schedule.steps, rules)
            except ScheduleError as error:
                named = max((step.microbatch + 1 for step in schedule), default=0)
                if named != num_microbatches:
                    error.add_note(
                        f"the run has {num_microbatches} batches, and the schedule {named} microbatches; give one "
                        f"batch for each"
                    )
                raise
            program = compile_steps(schedule.steps, rules, [chunk] * num_microbatches)
            text = f"{mode} {num_microbatches}\n{schedule}"
            compiled = self._keep(key, Compiled(program, fingerprint(text), (schedule, chunk)))
        return compiled

    def of_pair(
        self,
        schedule: PairSchedule,
        forward: ChunkPlan | None,
        backward: ChunkPlan | None,
        calls: frozenset[Call],
    ) -> Compiled:
        """The program of a pair of chunks, either of which may be None, with these calls of the trainer.

        Raises:
            ScheduleError: the schedule is not valid for the chunks.
        """
        key = (id(schedule), id(forward), id(backward), calls)
        compiled = self._compiled.get(key)
        if compiled is None:
            rules = Rules.of_pair(
                None if forward is None else forward.shape, None if backward is None else backward.shape
            )
            check(schedule.steps, rules)
            lanes = {call: self._post_forward_lane if call is Call.POST_FORWARD else 0 for call in calls}
            program = compile_steps(schedule.steps, rules, [forward, backward], lanes)
            sources = (schedule, forward, backward)
            compiled = self._keep(key, Compiled(program, fingerprint(f"pair\n{schedule}"), sources))
        return compiled

    def _keep(self, key: tuple[Hashable, ...], compiled: Compiled) -> Compiled:
        if len(self._compiled) == MAX_COMPILED:  # a trainer may make a new schedule for every step
            del self._compiled[next(iter(self._compiled))]
        self._compiled[key] = compiled
        return compiled
