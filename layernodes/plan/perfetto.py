"""A timeline in Chrome's JSON trace format, which ui.perfetto.dev and chrome://tracing open.

One process with a thread for each stream, a slice a step, and, where bytes are known,
a counter of live activations. Times are in microseconds from the first start.
"""

from __future__ import annotations

import json
from math import isfinite
from typing import TYPE_CHECKING

from layernodes.errors import ScheduleError
from layernodes.plan.file_kinds import TRACE, found_instead
from layernodes.plan.memory import live_bytes
from layernodes.plan.step import Step
from layernodes.slots import StreamType

if TYPE_CHECKING:
    from layernodes.plan.timeline import Timeline

_PROCESS = 1
_THREADS = {StreamType.COMPUTE: 1, StreamType.COMM: 2}
# Names of Chrome's own palette: three that differ in lightness as well as in hue.
_COLORS = {"F": "rail_response", "B": "rail_animation", "W": "rail_idle"}

_STREAMS = {thread: stream for stream, thread in _THREADS.items()}
_PRODUCER = "layernodes"

Event = dict[str, object]
Span = tuple[Step, StreamType, float, float]


def dump(timeline: Timeline) -> str:
    """The JSON text of a trace."""
    events = [_metadata("process_name", 0, {"name": "layernodes"})]
    for stream, thread in _THREADS.items():
        events.append(_metadata("thread_name", thread, {"name": f"{stream.value} stream"}))
        events.append(_metadata("thread_sort_index", thread, {"sort_index": thread}))
    exposed = {e.position: e for e in timeline.exposures}
    live = live_bytes(timeline.intervals)
    for position, interval in enumerate(timeline.intervals):
        step = interval.step
        arguments: Event = {
            "microbatch": step.microbatch,
            "layer": step.layer,
            "slot": step.slot,
            "position": position,
        }
        if position in exposed:
            arguments["exposed_us"] = exposed[position].seconds * 1e6
            arguments["waiter"] = str(exposed[position].waiter or "end of the run")
        events.append(
            {
                "name": str(step),
                "cat": str(step.phase),
                "ph": "X",
                "pid": _PROCESS,
                "tid": _THREADS[interval.stream],
                "ts": (interval.start - timeline.start) * 1e6,
                "dur": interval.duration * 1e6,
                "cname": _COLORS[step.phase],
                "args": arguments,
            }
        )
    if timeline.peak_activation_bytes:
        events += [
            {
                "name": "live activations",
                "ph": "C",
                "pid": _PROCESS,
                "ts": (interval.start - timeline.start) * 1e6,
                "args": {"bytes": held},
            }
            for interval, held in sorted(zip(timeline.intervals, live, strict=True), key=lambda pair: pair[0].start)
        ]
    lines = ",\n".join(json.dumps(event) for event in events)
    facts = json.dumps({"producer": _PRODUCER, "hardware_queues": timeline.hardware_queues})
    return f'{{"displayTimeUnit": "ms", "otherData": {facts}, "traceEvents": [\n{lines}\n]}}\n'


def is_trace(text: str) -> bool:
    """Whether a text is a trace, of anybody's, and not something else in JSON."""
    return '"traceEvents"' in text[:1000]


def parse(text: str, *, source: str) -> tuple[list[Span], int]:
    """Read what ``dump`` wrote: the steps in the order of their schedule, and the number of hardware queues.

    Raises:
        ScheduleError: it is no trace of layernodes.
    """
    try:
        trace = json.loads(text)
        facts = trace["otherData"]
        if facts["producer"] != _PRODUCER:
            raise KeyError("producer")
        slices = [event for event in trace["traceEvents"] if event["ph"] == "X"]
        slices.sort(key=lambda event: event["args"]["position"])
        for event in slices:
            if not (isfinite(event["ts"]) and 0 <= event["dur"] < float("inf")):
                raise ValueError(f"{event['name']} starts at {event['ts']} us and takes {event['dur']} us")
        spans = [(Step.parse(e["name"]), _STREAMS[e["tid"]], e["ts"] / 1e6, (e["ts"] + e["dur"]) / 1e6) for e in slices]
        return spans, int(facts["hardware_queues"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        for fault in found_instead(text, TRACE):
            raise ScheduleError(f"{source} cannot be read: {fault}") from None
        raise ScheduleError(
            f"{source} is no trace that layernodes wrote ({type(error).__name__}: {error}); write one with "
            f"'layernodes run --trace', 'layernodes trace' or Timeline.to_perfetto"
        ) from None


def _metadata(name: str, thread: int, arguments: Event) -> Event:
    return {"name": name, "ph": "M", "pid": _PROCESS, "tid": thread, "args": arguments}
