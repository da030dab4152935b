"""Timers as a training script gives them to Megatron-Core, which only count."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from functools import partial
from types import MappingProxyType, SimpleNamespace
from typing import Any


class CountingTimers:
    """What a training script gives as ``config.timers``; counts how often each name was timed."""

    def __init__(self, counts: Mapping[str, int] = MappingProxyType({})) -> None:
        self.counts = Counter(counts)
        self.running: set[str] = set()

    def __call__(self, name: str, log_level: int | None = None) -> Any:
        """The timer of a name, with ``start`` and ``stop``."""
        return SimpleNamespace(start=partial(self._start, name), stop=partial(self._stop, name))

    @property
    def messages(self) -> dict[str, int]:
        """The counts of messages between pipeline stages."""
        return {name: count for name, count in self.counts.items() if "-send" in name or "-recv" in name}

    @property
    def others(self) -> dict[str, int]:
        """All other counts."""
        return {name: count for name, count in self.counts.items() if name not in self.messages}

    def _start(self, name: str, barrier: bool = False) -> None:
        assert name not in self.running, f"timer {name} has been started already"
        self.running.add(name)

    def _stop(self, name: str, barrier: bool = False) -> None:
        self.running.remove(name)
        self.counts[name] += 1
