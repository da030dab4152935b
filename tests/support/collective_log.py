"""Which collectives the steps of a run issue over groups of several ranks, in order, on each lane."""

from __future__ import annotations

import threading
from typing import Any

import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from layernodes import Step
from layernodes.plan.collectives import group_of


class _Noting(TorchDispatchMode):
    """Notes the collectives of one step."""

    def __init__(self, step: Step) -> None:
        super().__init__()
        self.step = step
        self.found: list[tuple[str, str, str]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation."""
        name = group_of(args) if func.namespace == "c10d" else None
        if name is not None and dist.distributed_c10d._resolve_process_group(name).size() > 1:
            self.found.append((str(self.step), str(func), name))
        return func(*args, **(kwargs or {}))


class CollectiveLog:
    """Callbacks of a runner.

    Attributes:
        by_lane: for each lane, by the name of its thread, the step, operation and process group of each collective.
    """

    def __init__(self) -> None:
        self.by_lane: dict[str, list[tuple[str, str, str]]] = {}
        self._modes: dict[int, _Noting] = {}

    def begin(self, step: Step) -> None:
        """A step starts on this thread."""
        mode = self._modes[threading.get_ident()] = _Noting(step)
        mode.__enter__()

    def end(self, step: Step) -> None:
        """It is over."""
        mode = self._modes.pop(threading.get_ident())
        mode.__exit__(None, None, None)
        assert mode.step is step
        self.by_lane.setdefault(threading.current_thread().name, []).extend(mode.found)
