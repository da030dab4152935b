"""Streams on a clock of their own: steps really run, and take exactly as long as they are told."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from layernodes.plan.schedule import Schedule
from layernodes.plan.timeline import Timeline
from layernodes.streams import Spans


class VirtualStreams:
    """Performs each task in turn; what they took is what ``timeline_of(number of the run, steps)`` says."""

    def __init__(self, timeline_of: Callable[[int, Schedule], Timeline]) -> None:
        self._timeline_of = timeline_of
        self.runs: list[Schedule] = []

    def run(self, tasks: Sequence[Any], perform: Callable[[Any, None], None]) -> Spans:
        """See ``Streams.run``."""
        for task in tasks:
            perform(task, None)
        schedule = Schedule(task.step for task in tasks)
        self.runs.append(schedule)
        return [(i.start, i.end) for i in self._timeline_of(len(self.runs) - 1, schedule).intervals]
