"""Stand-ins for torch's CUDA device on the one in-order device that every machine has, the CPU.

Streams and events whose work is always done, factories that allocate where there is memory, and the CUDA generator as
the CPU's default one. ``layernodes.cpu`` puts them in place; nothing here patches anything.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable
from typing import Any, Final, final

import torch
from torch import Tensor

CPU: Final = torch.device("cpu")


class HostStream:
    """``torch.cuda.Stream`` on the CPU: whatever is issued has already run, so every wait is over at once."""

    def __init__(self, device: object = None, priority: int = 0, **_: object) -> None:
        self.device = CPU
        self.priority = priority

    @staticmethod
    def priority_range() -> tuple[int, int]:
        """Lowest and highest priority, as CUDA gives them."""
        return (0, -5)

    def query(self) -> bool:
        """All work issued here has finished."""
        return True

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def wait_event(self, event: HostEvent) -> None:
        """Nothing to wait for."""

    def wait_stream(self, stream: HostStream) -> None:
        """Nothing to wait for."""

    def record_event(self, event: HostEvent | None = None) -> HostEvent:
        """Record ``event``, or a new one, and return it."""
        event = HostEvent() if event is None else event
        event.record(self)
        return event


class HostEvent:
    """``torch.cuda.Event`` on the CPU: complete as soon as it is recorded, and remembers when that was."""

    def __init__(self, enable_timing: bool = False, **_: object) -> None:
        self._nanoseconds = 0 if not enable_timing else time.perf_counter_ns()

    def record(self, stream: HostStream | None = None) -> None:
        """Take the time."""
        self._nanoseconds = time.perf_counter_ns()

    def wait(self, stream: HostStream | None = None) -> None:
        """Nothing to wait for."""

    def query(self) -> bool:
        """The work before the event has finished."""
        return True

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def elapsed_time(self, end_event: HostEvent) -> float:
        """Milliseconds from this event's recording to ``end_event``'s."""
        return (end_event._nanoseconds - self._nanoseconds) / 1e6


@final
class StreamState:
    """The current stream of each thread, and the default stream of all."""

    def __init__(self) -> None:
        self._default = HostStream()
        self._local = threading.local()

    def default(self, device: object = None) -> HostStream:
        return self._default

    def current(self, device: object = None) -> HostStream:
        stream: HostStream = getattr(self._local, "stream", self._default)
        return stream

    def set(self, stream: HostStream | None) -> None:
        if stream is not None:
            self._local.stream = stream

    def use(self, stream: HostStream | None) -> _StreamContext:
        return _StreamContext(self, stream)


@final
class _StreamContext:
    """``torch.cuda.StreamContext`` on the CPU."""

    __slots__ = ("_outer", "_state", "_stream")

    def __init__(self, state: StreamState, stream: HostStream | None) -> None:
        self._state = state
        self._stream = stream

    def __enter__(self) -> None:
        self._outer = self._state.current()
        self._state.set(self._stream)

    def __exit__(self, *_: object) -> None:
        self._state.set(self._outer)


def ignoring() -> Callable[..., None]:
    """A function for which there is nothing to do on a CPU; a new one each time.

    Dynamo tells torch's functions apart by identity, and refuses to start where two of them are one.
    """

    def ignore(*_: object, **__: object) -> None:
        pass

    return ignore


def false() -> bool:
    """A CPU captures no graph."""
    return False


def itself(tensor: Tensor, *_: object, **__: object) -> Tensor:
    """``Tensor.cuda``: the tensor is on the device already."""
    return tensor


def device_type(own: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``Tensor.type`` so that the name of a CPU tensor's type is that of a CUDA tensor's."""

    @functools.wraps(own)
    def type_of(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        found = own(tensor, *args, **kwargs)
        return found.replace("torch.", "torch.cuda.", 1) if isinstance(found, str) else found

    return type_of


def on_cpu(factory: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Wrap a torch factory so that a CUDA ``device=`` means the CPU, where no memory is pinned for copies to a GPU."""

    @functools.wraps(factory)
    def create(*args: Any, **kwargs: Any) -> Tensor:
        device = kwargs.get("device")
        # An int is CUDA's shorthand for one of its devices.
        if device is not None and (isinstance(device, int) or torch.device(device).type == "cuda"):
            kwargs["device"] = CPU
        kwargs.pop("pin_memory", None)
        return factory(*args, **kwargs)

    return create


def get_rng_state(device: object = None, clone: bool = False, graph_safe: bool = False) -> Tensor | torch.Generator:
    """State of the CPU generator: a tensor, or a generator of its own where Megatron wants a graph-safe one."""
    return torch.default_generator.clone_state() if graph_safe else torch.get_rng_state()


def set_rng_state(new_state: Tensor | torch.Generator, device: object = None, graph_safe: bool = False) -> None:
    """Put a state of ``get_rng_state`` into the CPU generator."""
    torch.set_rng_state(new_state.get_state() if isinstance(new_state, torch.Generator) else new_state)


def manual_seed(seed: int) -> None:
    """Seed the CPU generator itself; ``torch.manual_seed`` would come back here through ``manual_seed_all``."""
    torch.default_generator.manual_seed(int(seed))


def reseed() -> None:
    """``torch.cuda.seed``: a seed nobody chose."""
    torch.default_generator.seed()


def share_storage(dst: Tensor, src: Tensor) -> None:
    """Make ``dst``'s storage, emptied before, hold ``src``'s bytes.

    Works below the tensor, so that every view of ``dst`` saved by autograd sees the data and no version counter moves.
    The extension shares the memory; this copies it, which changes no bit.
    """
    source = src.untyped_storage()
    storage = dst.untyped_storage()
    storage.resize_(source.nbytes())
    storage.copy_(source)
