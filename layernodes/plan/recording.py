"""Proves, without a device, that a schedule's two streams are ordered and that no storage is reused too early.

``RecordingStreams`` run the steps one after the other in the schedule's order, and pretend that they run on two streams
with nothing between them but the program's waits. Every operation that torch dispatches inside a step is seen with the
storages that it reads, writes and makes::

    clock of a step      its own lane up to itself, joined with the clock of the step it waits for (a vector clock)
    order                a storage written by a step may be read or written on the other lane only by a step whose
                         clock has it, and a storage read there may be written only so
    released             a storage that a step gave back is filled with a pattern, and nobody touches it any more
    reuse                a storage that is freed goes, as by a caching allocator, to the next step of the lane that it
                         was allocated on: whoever used it on the other lane is in that step's clock, or has told the
                         allocator (``Lane.uses``)
    undeclared           a step reads what another step made only if it was handed it: as an input, a gradient, a
                         declared handoff, or through the chunk state
    collectives          those of one process group are issued on one lane, or by ordered backward steps

The first violation ends the run with ``StreamOrderError``, which names both steps and the tensor. Values are those of
the inline streams, bit for bit.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final, final

from torch import Tensor
from torch.nn import Parameter
from torch.utils._python_dispatch import TorchDispatchMode

from layernodes.errors import StreamOrderError
from layernodes.lane import Lane, tensors_in
from layernodes.plan.collectives import Issuers, group_of
from layernodes.plan.program import LANES, Op
from layernodes.plan.storages import Mark, Storage, accesses_of, has_storage
from layernodes.slots import Phase, StreamType
from layernodes.streams import NO_WAIT, Spans

_POISON: Final = 0xFF  # NaN in every floating-point type


class RecordKind(StrEnum):
    """What a record tells of."""

    LAUNCH = "launch"
    WAIT = "wait"
    READ = "read"
    WRITE = "write"
    RELEASE = "release"


@final
@dataclass(frozen=True, slots=True)
class Record:
    """One thing that a step did.

    Attributes:
        kind: what.
        step: text of the step.
        stream: the stream it runs on.
        subject: the tensor read, written or released; the step waited for; empty for a launch.
        storage: number of the tensor's storage, from 0 in order of first use; None for launches and waits.
    """

    kind: RecordKind
    step: str
    stream: StreamType
    subject: str = ""
    storage: int | None = None


@final
class RecordingStreams:
    """Streams of a ``Runner`` that run in order, record everything and check it.

    Attributes:
        records: what the last run did, in order.
    """

    def __init__(self) -> None:
        self.records: list[Record] = []

    def run(self, tasks: Sequence[Op], perform: Callable[[Op, Lane | None], None]) -> Spans:
        """Run ``tasks`` in order, each through ``perform``; returns their start and end. See ``Streams.run``.

        Raises:
            StreamOrderError: two steps are not ordered, or a storage is used wrongly; nothing after that has run.
        """
        self.records = []
        recorder = _Recorder(self.records)
        clocks = ([0, 0], [0, 0])
        marks: tuple[list[Mark], list[Mark]] = ([], [])
        spans: list[tuple[float, float]] = []
        clock = time.perf_counter
        start = clock()
        for op in tasks:
            mine, other = clocks[op.lane], 1 - op.lane
            self.records.append(Record(RecordKind.LAUNCH, op.text, LANES[op.lane]))
            if op.waits_for != NO_WAIT:
                awaited = marks[other][op.waits_for]
                mine[0], mine[1] = (max(a, b) for a, b in zip(mine, awaited.clock, strict=True))
                self.records.append(Record(RecordKind.WAIT, op.text, LANES[op.lane], awaited.op.text))
            mine[op.lane] = op.index + 1
            mark = Mark(op, (mine[0], mine[1]))
            marks[op.lane].append(mark)
            began = clock()
            recorder.begin(mark)
            with recorder:
                perform(op, recorder)
            recorder.end()
            spans.append((began - start, clock() - start))
        return spans


@final
class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]  # its __init_subclass__ is untyped in torch
    """Sees every operation of the current step; is its lane, too."""

    def __init__(self, records: list[Record]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # untyped in torch
        self._records = records
        self._storages: dict[int, Storage] = {}
        self._count = 0
        self._now: Mark | None = None
        self._paused = False
        self._freed: tuple[list[Storage], list[Storage]] = ([], [])
        self._parameters: dict[int, weakref.ref[Parameter]] = {}
        self._groups: dict[str, Issuers] = {}

    def begin(self, mark: Mark) -> None:
        """The step ``mark`` starts; storages freed before are handed out to it."""
        self._now = mark
        self._hand_out()

    def end(self) -> None:
        """The step is over: see what it freed, and which gradients of parameters it made."""
        mark = self._mark()
        if mark.op.step is not None and mark.op.step.phase is not Phase.F:
            for parameter in [reference() for reference in self._parameters.values()]:
                for gradient in (getattr(parameter, "grad", None), getattr(parameter, "main_grad", None)):
                    storage = None if gradient is None else self._known(gradient)
                    if storage is not None:
                        storage.maker = None  # it outlives the step, and hooks may read it
        for key, storage in list(self._storages.items()):
            if storage.ref.expired():  # type: ignore[no-untyped-call]  # untyped in torch
                del self._storages[key]
                if storage.maker is not None and storage.released_by is None:
                    self._freed[storage.maker.op.lane].append(storage)
        self._hand_out()

    def uses(self, value: object) -> None:
        """See ``Lane.uses``."""
        for tensor in tensors_in(value):
            storage = self._known(tensor)
            if storage is not None:
                storage.declared.add(self._mark().key)
                storage.used_on.add(self._mark().op.lane)

    def may_use(self, value: object) -> None:
        """See ``Lane.may_use``."""
        for tensor in tensors_in(value):
            storage = self._known(tensor)
            if storage is not None:
                storage.declared.add(self._mark().key)

    def releases(self, tensor: Tensor) -> None:
        """See ``Lane.releases``; the storage is poisoned, and handed out again only in thought."""
        self.uses(tensor)
        storage = self._known(tensor) or self._add(tensor, None, "from outside")
        self._access(storage, tensor, writes=True, kind=RecordKind.RELEASE)
        storage.released_by = self._mark()
        if storage.maker is not None:
            self._freed[storage.maker.op.lane].append(storage)
        self._paused = True
        try:
            tensor.untyped_storage().fill_(_POISON)  # type: ignore[attr-defined]  # not in torch's stubs
        finally:
            self._paused = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Check what the operation reads and writes, run it, and note what it makes."""
        kwargs = kwargs or {}
        if self._paused:
            return func(*args, **kwargs)
        written: set[Storage] = set()
        for tensor, writes in sorted(accesses_of(func, args, kwargs), key=lambda found: not found[1]):
            storage = self._known(tensor) or self._add(tensor, None, "from outside")
            if isinstance(tensor, Parameter):
                self._parameters[id(tensor)] = weakref.ref(tensor)
            if writes:
                written.add(storage)
            if not func.is_view and (writes or storage not in written):  # t[i] += x ends with a copy of t to itself
                self._access(storage, tensor, writes=writes)
        if func.namespace == "c10d":
            self._check_group(func, args)
        result = func(*args, **kwargs)
        for tensor in tensors_in(result):
            if has_storage(tensor) and self._known(tensor) is None:
                self._add(tensor, self._mark(), f"made by {self._mark().op.text} ({func})")
        return result

    def _mark(self) -> Mark:
        assert self._now is not None
        return self._now

    def _known(self, tensor: Tensor) -> Storage | None:
        return self._storages.get(tensor.untyped_storage()._cdata) if has_storage(tensor) else None

    def _add(self, tensor: Tensor, maker: Mark | None, made_by: str) -> Storage:
        storage = Storage(self._count, tensor, maker, made_by)
        self._count += 1
        self._storages[tensor.untyped_storage()._cdata] = storage
        if maker is not None:
            self._note(RecordKind.WRITE, storage)
        return storage

    def _note(self, kind: RecordKind, storage: Storage) -> None:
        op = self._mark().op
        self._records.append(Record(kind, op.text, LANES[op.lane], storage.name, storage.number))

    def _access(self, storage: Storage, tensor: Tensor, *, writes: bool, kind: RecordKind | None = None) -> None:
        mark = self._mark()
        self._note(kind or (RecordKind.WRITE if writes else RecordKind.READ), storage)
        verb = "writes" if writes else "reads"
        if storage.released_by is not None:
            raise self._error(
                "released", storage, storage.released_by, f"{verb} a storage that {{other}} has given back"
            )
        if tensor.untyped_storage().nbytes() == 0 and tensor.numel() > 0:
            raise self._error("released", storage, None, f"{verb} a storage that was emptied")
        for other in (storage.writer, *(storage.readers if writes else ())):
            if other is not None and other.op.lane != mark.op.lane and not mark.comes_after(other):
                did = "wrote" if other is storage.writer else "read"
                raise self._error(
                    "order", storage, other, f"{verb} what {{other}} {did} on the other stream, without waiting for it"
                )
        if storage.maker is not None and not writes and not mark.may_read(storage.maker, storage.declared):
            raise self._error(
                "undeclared",
                storage,
                storage.maker,
                "reads what {other} made, which is no input, gradient or handoff of it; let the slot that makes it "
                "declare it in 'writes' and put it, and this one declare it in 'reads' and take it",
            )
        if writes:
            storage.writer = mark
            storage.readers = [None, None]
        else:
            storage.readers[mark.op.lane] = mark

    def _hand_out(self) -> None:
        """Give what was freed to the current step, if it runs on the lane that allocated it."""
        mark = self._mark()
        freed = self._freed[mark.op.lane]
        for storage in freed:
            for user in (storage.writer, *storage.readers):
                if user is None or user.op.lane == mark.op.lane or user.op.lane in storage.used_on:
                    continue
                if not mark.comes_after(user):
                    raise self._error(
                        "reuse",
                        storage,
                        user,
                        "may be handed a freed storage while {other} still uses it on the other stream; "
                        "tell the allocator with Lane.uses",
                    )
        freed.clear()

    def _check_group(self, func: Any, args: Sequence[Any]) -> None:
        name = group_of(args)
        if name is None:
            return
        op, clock = self._mark()
        self._groups.setdefault(name, Issuers()).add(op, clock[1 - op.lane], name)

    def _error(self, rule: str, storage: Storage, other: Mark | None, what: str) -> StreamOrderError:
        step = self._mark().op
        other_text = None if other is None else other.op.text
        return StreamOrderError(
            f"{step.text} ({LANES[step.lane].value}) {what.format(other=other_text)}: {storage.name}",
            rule=rule,
            step=step.text,
            other=other_text,
            tensor=storage.name,
        )
