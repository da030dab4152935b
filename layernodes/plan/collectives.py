"""Collectives of one process group come from one stream only: two streams would issue them in no fixed order, and the
ranks would wait in different ones.

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
        self._first: dict[int, Op] = {}

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
            is_alone = self._running[1 - op.lane] is None
            self._is_alone[op.lane] = is_alone
            if not is_alone:
                self._is_alone[1 - op.lane] = False
            self._before[op.lane] = self._sequence_numbers()

    def end(self, op: Op) -> None:
        """It is over.

        Raises:
            StreamOrderError: it issued collectives of a group that a step of the other stream uses too.
        """
        with self._lock:
            self._running[op.lane] = None
            if not self._is_alone[op.lane]:
                return
            for i, (before, after) in enumerate(zip(self._before[op.lane], self._sequence_numbers(), strict=True)):
                if before != after:
                    first = self._first.setdefault(i, op)
                    if first.lane != op.lane:
                        raise StreamOrderError.of_group(
                            self._groups[i].group_name,
                            step=op.text,
                            other=first.text,
                            stream=LANES[first.lane].value,
                        )

    def _sequence_numbers(self) -> list[int]:
        return [_sequence_number(group) for group in self._groups]


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
