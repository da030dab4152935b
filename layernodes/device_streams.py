"""The ``device`` backend of ``streams``: one host thread launches both lanes on two streams of an accelerator."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final, final, overload

import torch

from layernodes.errors import NodeStateError
from layernodes.lane import DeviceLane, Lane, accelerator_with_streams
from layernodes.streams import NO_WAIT, Spans, Task

_RUNS_AHEAD: Final = 2


@final
class DeviceStreams[T: Task]:
    """Two streams of the current accelerator: the caller's current one for compute, one of its own for communication.

    The host does not wait for the device at the end of a run, so that the next one is launched meanwhile; it stays two
    runs ahead at most, since storages that both streams used come back only when the device is done with them.

    Args:
        device: the accelerator; None takes the current one of each run.

    Raises:
        NodeStateError: there is no accelerator with streams.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        device = device or accelerator_with_streams()
        if device is None:
            raise NodeStateError(
                "streams='cuda' needs an accelerator with streams and none is available; use 'threads' or 'inline'"
            )
        self._device = device
        self._comm = torch.Stream(device=device)
        self._ends: deque[torch.Event] = deque()

    def run(self, tasks: Sequence[T], perform: Callable[[T, Lane | None], None]) -> Spans:
        """See ``Streams.run``; spans are measured on the device, and waited for when they are looked at."""
        if len(self._ends) == _RUNS_AHEAD:
            self._ends.popleft().synchronize()
        compute = torch.accelerator.current_stream(self._device)
        if self._comm.device != compute.device:  # the caller has since gone to another device (``set_device``)
            self._comm = torch.Stream(device=compute.device)
        streams = (compute, self._comm)
        on_lane = tuple(DeviceLane(stream) for stream in streams)
        events: list[tuple[torch.Event, torch.Event]] = []
        done: tuple[dict[int, torch.Event], dict[int, torch.Event]] = ({}, {})
        origin = self._event(streams[0])
        streams[1].wait_event(origin)
        try:
            for task in tasks:
                stream = streams[task.lane]
                if task.waits_for != NO_WAIT:
                    stream.wait_event(done[1 - task.lane][task.waits_for])
                torch.accelerator.set_stream(stream)
                began = self._event(stream)
                perform(task, on_lane[task.lane])
                ended = self._event(stream)
                events.append((began, ended))
                if task.is_awaited:
                    done[task.lane][task.index] = ended
        finally:
            torch.accelerator.set_stream(streams[0])
            streams[0].wait_stream(streams[1])
        end = self._event(streams[0])
        self._ends.append(end)
        return _DeviceSpans(origin, events, end)

    def _event(self, stream: torch.Stream) -> torch.Event:
        event = torch.Event(device=self._device, enable_timing=True)
        event.record(stream)
        return event


@final
class _DeviceSpans(Sequence[tuple[float, float]]):
    """Spans between events, read off them once somebody looks."""

    def __init__(
        self, origin: torch.Event, events: Sequence[tuple[torch.Event, torch.Event]], end: torch.Event
    ) -> None:
        self._origin = origin
        self._events = events
        self._end = end

    def __len__(self) -> int:
        return len(self._events)

    @overload
    def __getitem__(self, index: int) -> tuple[float, float]: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[tuple[float, float]]: ...

    def __getitem__(self, index: int | slice) -> tuple[float, float] | Sequence[tuple[float, float]]:
        return self._seconds[index]

    @functools.cached_property
    def _seconds(self) -> list[tuple[float, float]]:
        self._end.synchronize()
        since = self._origin.elapsed_time
        return [(since(began) / 1e3, since(ended) / 1e3) for began, ended in self._events]
