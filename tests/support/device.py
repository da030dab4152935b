"""A stand-in for an accelerator's streams and events on the CPU: work runs at once, and its order is kept in mind.

Each stream knows the work that is done before whatever is issued on it next: its own, and what the events that it
waited for had seen. A missing wait is work that is not known.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch


class StandInStream:
    """A stream.

    Attributes:
        known: names of the work that is done before what is issued next.
        threads: names of the threads that have entered it and not left it.
    """

    def __init__(self, device: Any = None, **_: Any) -> None:
        self.device = torch.device(device or "cuda")
        self.known: set[str] = set()
        self.threads: list[str] = []

    def __enter__(self) -> None:
        self.threads.append(threading.current_thread().name)

    def __exit__(self, *_: object) -> None:
        self.threads.remove(threading.current_thread().name)

    def wait_event(self, event: StandInEvent) -> None:
        """Whatever the event has seen is done before what comes next."""
        self.known |= event.seen

    def wait_stream(self, stream: StandInStream) -> None:
        """The same for all that was issued on the other stream."""
        self.known |= stream.known

    def synchronize(self) -> None:
        """All has run already."""


class StandInEvent:
    """An event."""

    num_awaited = 0
    """How often the host has waited for one."""

    def __init__(self, **_: Any) -> None:
        self.seen: set[str] = set()

    def record(self, stream: StandInStream) -> None:
        """See what the stream knows now."""
        self.seen = set(stream.known)

    def synchronize(self) -> None:
        """The host waits."""
        type(self).num_awaited += 1

    def elapsed_time(self, other: StandInEvent) -> float:
        """No time passes here."""
        return 0.0


class StandInDevice:
    """The accelerator, with the current stream that every accelerator has.

    Attributes:
        stream: the current stream.
    """

    def __init__(self) -> None:
        self.stream = StandInStream()

    def set_stream(self, stream: StandInStream) -> None:
        """Make it the current one."""
        self.stream = stream

    def issue(self, name: str) -> set[str]:
        """Issue work on the current stream; what is done before it is returned."""
        before = set(self.stream.known)
        self.stream.known.add(name)
        return before


@contextmanager
def stand_in_device() -> Iterator[StandInDevice]:
    """Let ``torch.accelerator`` be the stand-in; tensors stay on the CPU."""
    device = StandInDevice()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.accelerator, "is_available", lambda: True)
        patch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
        patch.setattr(torch.accelerator, "current_stream", lambda _=None: device.stream)
        patch.setattr(torch.accelerator, "set_stream", device.set_stream)
        patch.setattr(torch, "Stream", StandInStream)
        patch.setattr(torch, "Event", StandInEvent)
        yield device
