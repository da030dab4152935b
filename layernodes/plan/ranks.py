"""The ranks that exchange tokens check that they hold the same schedule.

Ranks with different schedules would wait in different collectives for ever. So, on every run and for every group over
which the chunk exchanges tokens, each rank gathers all ranks' fingerprints: issued before the first step, on a CPU
group of its own so that it crosses no other collective, and awaited on both streams before the first step that may
communicate (the router already gathers token counts). A rank that never comes is waited for as long as the group's own
collectives would wait. A rank that refuses its schedule or its batches takes part too, with a fingerprint that nobody
else has, so that the others are told.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from layernodes.errors import RankMismatchError

_NUM_BYTES = 32


def fingerprint(text: str) -> Tensor:
    """The SHA-256 of a text, as 32 bytes."""
    return torch.frombuffer(bytearray(hashlib.sha256(text.encode()).digest()), dtype=torch.uint8)


@final
class RankCheck:
    """Compares fingerprints over groups; makes the CPU side group of each once."""

    def __init__(self) -> None:
        self._side_groups: dict[tuple[int, ...], ProcessGroup] = {}
        self._withdrawn: list[PendingCheck] = []

    def issue(self, groups: Iterable[ProcessGroup], mine: Tensor) -> PendingCheck:
        """Start gathering the fingerprints of every group."""
        pending: list[tuple[Any, Sequence[int], list[Tensor]]] = []
        for group in groups:
            ranks = tuple(dist.get_process_group_ranks(group))
            found = [torch.empty(_NUM_BYTES, dtype=torch.uint8, device="cpu") for _ in ranks]
            work = dist.all_gather(found, mine, group=self._side_group(ranks, group), async_op=True)
            pending.append((work, ranks, found))
        return PendingCheck(mine, pending)

    def withdraw(self, groups: Iterable[ProcessGroup]) -> None:
        """Tell the others that this rank will not run; waits for nobody."""
        self._withdrawn.append(self.issue(groups, fingerprint("withdrawn")))

    def close(self) -> None:
        """Give the side groups back."""
        self._withdrawn.clear()
        while self._side_groups:
            _, group = self._side_groups.popitem()
            if dist.is_initialized():
                dist.destroy_process_group(group)

    def _side_group(self, ranks: tuple[int, ...], main: ProcessGroup) -> ProcessGroup:
        if ranks not in self._side_groups:
            self._side_groups[ranks] = side_group(main)
        return self._side_groups[ranks]


def side_group(main: ProcessGroup) -> ProcessGroup:
    """A CPU group of the same ranks, which waits for a rank as long as ``main`` does; all of them call it."""
    ranks = dist.get_process_group_ranks(main)
    group = dist.new_group(ranks, backend="gloo", timeout=_timeout_of(main), use_local_synchronization=True)
    assert isinstance(group, ProcessGroup)
    return group


def _timeout_of(group: ProcessGroup) -> timedelta | None:
    """How long the group's collectives wait for a rank; None, which stands for torch's default, where it does not say.

    Torch has no public way to ask.
    """
    try:
        backend: Any = group._get_backend(group._device_types[0])
        timeout: timedelta = backend.options._timeout
    except (AttributeError, RuntimeError):
        return None
    return timeout


@final
class PendingCheck:
    """A check that has been issued and not awaited."""

    def __init__(self, mine: Tensor, pending: list[tuple[Any, Sequence[int], list[Tensor]]]) -> None:
        self._mine = mine
        self._pending = pending
        self._lock = threading.Lock()
        self._is_done = False

    def wait(self) -> None:
        """Wait for the fingerprints and compare them; once that went well, does nothing.

        Raises:
            RankMismatchError: a rank of a group holds another schedule; raised on all of its ranks.
        """
        if self._is_done:
            return
        with self._lock:  # both lanes come here
            if not self._is_done:
                self._compare()
                self._pending.clear()
                self._is_done = True

    def _compare(self) -> None:
        for work, ranks, found in self._pending:
            work.wait()
            if any(not torch.equal(one, found[0]) for one in found):
                mine = [rank for rank, one in zip(ranks, found, strict=True) if torch.equal(one, self._mine)]
                others = [rank for rank in ranks if rank not in mine]
                raise RankMismatchError(
                    f"ranks {others} hold another schedule than ranks {mine}, or refused theirs, and they exchange "
                    f"tokens with each other; give all ranks of an expert-parallel group the same schedule and number "
                    f"of microbatches"
                )
