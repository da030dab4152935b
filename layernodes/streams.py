"""Streams: what runs two lanes of work so that each is a FIFO and each crossing waits.

A lane is a sequence of tasks in order. A task may wait for one of the other lane; everything before that one is then
done too. The three backends give that the same meaning:

    inline     one task after the other, in the order of the whole
    threads    the caller runs the compute lane, a thread of the run's own the communication lane
    device     one host thread launches all tasks in order on two accelerator streams, with events between them
               (``device_streams``)
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol, final, runtime_checkable

import torch

from layernodes.lane import Lane, accelerator_with_streams

NO_WAIT = -1


class Task(Protocol):
    """One task of a lane."""

    @property
    def text(self) -> str:
        """Its name."""
        ...

    @property
    def lane(self) -> int:
        """0 for compute, 1 for communication."""
        ...

    @property
    def index(self) -> int:
        """Its index within its lane."""
        ...

    @property
    def position(self) -> int:
        """Its position in the order of the whole."""
        ...

    @property
    def waits_for(self) -> int:
        """Index of the task of the other lane that must be done before it; ``NO_WAIT`` for none."""
        ...

    @property
    def is_awaited(self) -> bool:
        """Whether a task of the other lane waits for it."""
        ...


Spans = Sequence[tuple[float, float]]
"""Start and end of each task, by position, in seconds from the start of the run."""


@runtime_checkable
class Streams[T: Task](Protocol):
    """Runs two lanes."""

    def run(self, tasks: Sequence[T], perform: Callable[[T, Lane | None], None]) -> Spans:
        """Run every task; an exception of ``perform`` ends the run and is raised from here, once.

        Args:
            tasks: in the order of the whole.
            perform: called with each task and the lane it runs on, where memory needs to be told of it.
        """
        ...


@final
class InlineStreams[T: Task]:
    """One task after the other."""

    def run(self, tasks: Sequence[T], perform: Callable[[T, Lane | None], None]) -> Spans:
        """See ``Streams.run``."""
        spans: list[tuple[float, float]] = []
        clock = time.perf_counter
        start = before = clock()
        for task in tasks:
            perform(task, None)
            now = clock()
            spans.append((before - start, now - start))
            before = now
        return spans


@final
class ThreadStreams[T: Task]:
    """Two threads: the caller's for the compute lane, one of the run's own for the communication lane.

    The second takes over the caller's grad mode, autocast, default device and hooks of saved tensors. It ends with the
    run; after a failure it ends when the task it is in returns, which for a collective may be the group's timeout, and
    the run does not wait for that longer than ``patience`` seconds.
    """

    def __init__(self, patience: float = 0.5) -> None:
        self._patience = patience

    def run(self, tasks: Sequence[T], perform: Callable[[T, Lane | None], None]) -> Spans:
        """See ``Streams.run``."""
        lanes = [[task for task in tasks if task.lane == lane] for lane in (0, 1)]
        spans = [(0.0, 0.0)] * len(tasks)
        progress = _Progress()
        start = time.perf_counter()

        # Handed over and not closed over: a lane that outlives the run still needs it when this frame has dropped it.
        def work(lane: int, progress: _Progress) -> None:
            clock = time.perf_counter
            for task in lanes[lane]:
                if not progress.wait(1 - lane, task.waits_for):
                    return
                began = clock()
                try:
                    perform(task, None)
                except BaseException as error:
                    progress.fail(error)
                    return
                spans[task.position] = (began - start, clock() - start)
                progress.advance(lane)

        if not lanes[1]:
            work(0, progress)
        else:
            inherit = ThreadState()

            def work_on_comm(progress: _Progress) -> None:
                with inherit.entered():
                    work(1, progress)

            thread = threading.Thread(target=work_on_comm, args=(progress,), name="layernodes-comm", daemon=True)
            thread.start()
            try:
                work(0, progress)
                progress.wait(1, lanes[1][-1].index)
            except BaseException as error:  # an interrupt between two tasks
                progress.fail(error)
            thread.join(self._patience if progress.error is not None else None)
        failure, progress.error = progress.error, None
        if failure is not None:
            try:
                raise failure
            finally:
                del failure, progress  # else the traceback would hold itself, and the run's tensors, in a cycle
        return spans


@final
class _Progress:
    """How many tasks each lane has done, and the first failure.

    A lane has one waiter at most, the other lane's thread. It leaves the index that it wants and passes the lane's
    gate, which whoever takes that index out opens, once; let through too early, it looks again. That hands over in a
    third of the time of a condition variable, which wakes its waiter only to let it wait for the notifier's lock.
    """

    __slots__ = ("_done", "_failing", "_gates", "_wanted", "error", "failed")

    def __init__(self) -> None:
        self._done = [0, 0]
        self._wanted: tuple[list[int], list[int]] = ([], [])
        self._gates = (threading.Lock(), threading.Lock())
        for gate in self._gates:
            gate.acquire()
        self._failing = threading.Lock()
        self.error: BaseException | None = None
        self.failed = False

    def wait(self, lane: int, index: int) -> bool:
        """Wait until ``lane`` has done the task ``index``; False if a task has failed."""
        while self._done[lane] <= index and not self.failed:
            self._wanted[lane].append(index)
            self._open(lane)  # the task may have been done since it was looked at
            self._gates[lane].acquire()
        return not self.failed

    def advance(self, lane: int) -> None:
        """One more task of ``lane`` is done."""
        self._done[lane] += 1
        if self._wanted[lane]:
            self._open(lane)

    def fail(self, error: BaseException) -> None:
        """Keep the first failure and wake everybody; a later one, perhaps after the run, has nobody to tell."""
        with self._failing:
            if not self.failed:
                self.error = error
            self.failed = True
        for lane in (0, 1):
            self._open(lane)

    def _open(self, lane: int) -> None:
        """Let the waiter for ``lane`` through, if there is one and it need not wait any longer."""
        wanted = self._wanted[lane]
        try:
            if self.failed or self._done[lane] > wanted[0]:
                wanted.pop()
                self._gates[lane].release()
        except IndexError:  # nobody waits, or the other thread has just opened
            pass


def autocasts() -> tuple[tuple[str, torch.dtype], ...]:
    """The autocasts that are on here, as device type and dtype."""
    accelerator = torch.accelerator.current_accelerator()
    kinds = ("cpu",) if accelerator is None else ("cpu", accelerator.type)
    return tuple((kind, torch.get_autocast_dtype(kind)) for kind in kinds if torch.is_autocast_enabled(kind))


def _stream_in_use() -> torch.Stream | None:
    """The accelerator's current stream, on its current device; None where there is none, or nobody has used it yet."""
    accelerator = accelerator_with_streams()
    if accelerator is None or not torch.get_device_module(accelerator).is_initialized():
        return None
    return torch.accelerator.current_stream()


@final
class ThreadState:
    """What torch keeps for each thread, taken in one thread and entered in another."""

    def __init__(self) -> None:
        self._grad = torch.is_grad_enabled()
        self._autocasts = autocasts()
        self._autocast_caches = torch.is_autocast_cache_enabled()
        self._device = torch.get_default_device()
        self._inference = torch.is_inference_mode_enabled()
        self._stream = _stream_in_use()
        self._saved_tensors_hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Grad mode, autocast, default device, inference mode, hooks of saved tensors, and the accelerator's current
        device and stream as they were where this was made."""
        with contextlib.ExitStack() as stack:
            if self._inference:
                stack.enter_context(torch.inference_mode())
            stack.enter_context(torch.set_grad_enabled(self._grad))
            for kind, dtype in self._autocasts:
                stack.enter_context(torch.autocast(kind, dtype=dtype, cache_enabled=self._autocast_caches))
            if self._device.type != "cpu":
                stack.enter_context(self._device)
            if self._stream is not None:
                stack.enter_context(self._stream)
            if self._saved_tensors_hooks is not None:  # the innermost pair, which is the one that torch calls
                stack.enter_context(torch.autograd.graph.saved_tensors_hooks(*self._saved_tensors_hooks))
            yield
