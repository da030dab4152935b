"""The critical path: the chain of steps that determines when the run ends.

Contract: begins at the step that ends last (of several, the one that stands last in the schedule) and goes back::

    from a step, go to that one of (its predecessors, the step before it on its stream) that ended last;
        of several, a predecessor before the stream's, and among predecessors the one that stands last
    stop at a step that has none, or that started with the timeline

In a simulated timeline each step starts exactly when the one before it on the path ends, so the path's durations add up
to the makespan; in a measured one the gaps between them are what launching and waiting cost. With one hardware queue a
step may be held up by the launch of the one before it alone; then the path goes on from there, without that one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from layernodes.plan.retrace import dependencies_of
from layernodes.plan.rules import NONE
from layernodes.slots import StreamType

if TYPE_CHECKING:
    from layernodes.plan.timeline import Timeline


def find_critical_path(timeline: Timeline) -> list[int]:
    """Positions of the steps on the critical path, in order of time.

    Raises:
        ScheduleError: the timeline came without dependencies, and its steps are those of no schedule.
    """
    intervals = timeline.intervals
    if not intervals:
        return []
    dependencies = dependencies_of(timeline)
    previous: list[int] = []
    newest = dict.fromkeys(StreamType, NONE)
    for position, interval in enumerate(intervals):
        previous.append(newest[interval.stream])
        newest[interval.stream] = position
    at = max(range(len(intervals)), key=lambda p: (intervals[p].end, p))
    path = [at]
    while intervals[at].start > timeline.start:
        stream_before = previous[at]
        candidates = [(intervals[p].end, True, p) for p in dependencies[at]]
        if stream_before != NONE:
            candidates.append((intervals[stream_before].end, stream_before in dependencies[at], stream_before))
        latest = max(candidates, default=None)
        held_by_launch = latest is None or latest[0] < intervals[at].start
        if timeline.hardware_queues == 1 and held_by_launch and at > 0:
            at -= 1
            continue
        if latest is None:
            break
        at = latest[2]
        path.append(at)
    return path[::-1]
