"""Collectives of one process group come from one stream only: two streams would issue them in no fixed order, and the
ranks would wait in different ones.

Backward steps whose order the schedule fixes may share a group all the same: the reduction of gradients
(``overlap_grad_reduce``) starts in whichever step completes a bucket.

Which step issues collectives of which group shows in the groups' sequence numbers. ``CollectiveWatch`` compares them
before and after each step of a program's first run, for every group of more than one rank that counts; where steps of
both streams overlap, it cannot tell whose they are and leaves them out. The recording streams see every collective.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, Self, final

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from layernodes.errors import StreamOrderError
from layernodes.plan.program import LANES, Op
from layernodes.slots import Phase


@final
class Issuers:
    """The steps that have issued collectives of one process group, by lane."""

    def __init__(self) -> None:
        self._ops: tuple[list[Op], list[Op]] = ([], [])

    def add(self, op: Op, num_done: int, group: str) -> None:
        """One more step.

        Args:
            op: the step.
            num_done: how many steps of the other lane must be done before it.
            group: the name of the group.

        Raises:
            StreamOrderError: a step of the other lane has issued some, and the two are not ordered backward steps.
        """
        for other in self._ops[1 - op.lane]:
            if not (_is_backward(op) and _is_backward(other) and other.index < num_done):
                raise StreamOrderError.of_group(group, step=op.text, other=other.text, stream=LANES[other.lane].value)
        self._ops[op.lane].append(op)


@final
class CollectiveWatch:
    """Watches the steps of one run; ``of_process`` makes one for all groups of this process.

    Args:
        groups: groups that count their collectives.
    """

    def __init__(self, groups: Sequence[ProcessGroup]) -> None:
        self._groups = groups
        self._lock = threading.Lock()
        self._running: list[Op | None] = [None, None]
        self._before: list[list[int]] = [[], []]
        self._is_alone = [True, True]
        self._done_before = [0, 0]  # of the latest step of each lane: how many of the other lane must be done
        self._issuers = [Issuers() for _ in groups]

    @classmethod
    def of_process(cls) -> Self | None:
        """A watch over the groups of more than one rank that count; None where there is none."""
        if not dist.is_initialized():
            return None
        groups = [group for group in dist.distributed_c10d._world.pg_map if group.size() > 1 and _counts(group)]
        return cls(groups) if groups else None

    def begin(self, op: Op) -> None:
        """A step starts."""
        with self._lock:
            self._running[op.lane] = op
            self._done_before[op.lane] = max(self._done_before[op.lane], op.waits_for + 1)
            is_alone = self._running[1 - op.lane] is None
            self._is_alone[op.lane] = is_alone
            if not is_alone:
                self._is_alone[1 - op.lane] = False
            self._before[op.lane] = self._sequence_numbers()

    def end(self, op: Op) -> None:
        """It is over.

        Raises:
            StreamOrderError: it issued collectives of a group that the other stream uses too (``Issuers``).
        """
        with self._lock:
            self._running[op.lane] = None
            if not self._is_alone[op.lane]:
                return
            for i, (before, after) in enumerate(zip(self._before[op.lane], self._sequence_numbers(), strict=True)):
                if before != after:
                    self._issuers[i].add(op, self._done_before[op.lane], self._groups[i].group_name)

    def _sequence_numbers(self) -> list[int]:
        return [_sequence_number(group) for group in self._groups]


def _is_backward(op: Op) -> bool:
    return op.step is not None and op.step.phase is not Phase.F


def _counts(group: ProcessGroup) -> bool:
    try:
        _sequence_number(group)
    except RuntimeError:
        return False
    return True


def _sequence_number(group: ProcessGroup) -> int:
    return int(group._get_sequence_number_for_group())  # type: ignore[attr-defined]  # C++, not in torch's stubs


def group_of(arguments: Sequence[Any]) -> str | None:
    """The name of the process group among the arguments of a collective operation."""
    for argument in arguments:
        if isinstance(argument, torch.ScriptObject):
            try:
                return str(ProcessGroup.unbox(argument).group_name)
            except RuntimeError:
                continue  # some other object: a reduction
    return None
