"""Runs a schedule over the microbatches of a chunk, on inline, thread or accelerator streams, with the plain layer's
bits.

check the schedule against the chunk's shape; compile it (both once for each schedule)
open a chunk run for each microbatch
issue the ranks' comparison of schedules
let the streams perform each step, in lane order and after what it waits for
take outputs and gradients, close the runs
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from types import TracebackType
from typing import Any, Self, final

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from layernodes.device_streams import DeviceStreams
from layernodes.errors import NodeStateError, ScheduleError
from layernodes.plan.arguments import check_argument
from layernodes.plan.chunk_plan import ChunkPlan
from layernodes.plan.chunk_run import ChunkRun
from layernodes.plan.collectives import CollectiveWatch
from layernodes.plan.layer_hooks import LayerHooks, hooks_of
from layernodes.plan.performance import Performance, StepCallback
from layernodes.plan.program import LANES, Call, Op, Program
from layernodes.plan.program_cache import Compiled, ProgramCache
from layernodes.plan.ranks import RankCheck
from layernodes.plan.rng import RngMode, StepGenerators
from layernodes.plan.rules import Mode
from layernodes.plan.schedule import PairSchedule, Schedule
from layernodes.plan.stream_kind import StreamKind, make_streams
from layernodes.plan.timeline import Interval, Timeline
from layernodes.slots import Phase
from layernodes.streams import Spans, Streams


@final
@dataclass(frozen=True, kw_only=True)
class RunResult:
    """What a run returned; nothing of it holds a graph.

    Attributes:
        outputs: what the chunk returned, by microbatch.
        input_grads: gradient of the chunk's input, by microbatch; None where there is none.
    """

    outputs: tuple[Any, ...]
    input_grads: tuple[Tensor | None, ...]
    _program: Program = field(repr=False)
    _spans: Spans = field(repr=False)

    @cached_property
    def timeline(self) -> Timeline:
        """What ran where and when."""
        return _timeline(self._program, self._spans)


@final
class Runner:
    """Runs schedules. Use it as a context manager, or ``close`` it.

    Args:
        streams: ``"auto"``, ``"cuda"`` (any accelerator), ``"threads"``, ``"inline"`` or ``"recording"``; or an object,
            such as ``RecordingStreams()``, of which the caller keeps hold.
        rng: ``"plain"``: random numbers are drawn in the order in which steps run; ``"per_step"``: each step's depend
            on the state at the start, its microbatch, layer and slot alone, so that every order gives the same bits.
        before_step, after_step: called with each step, on its thread, around it.
        layer_hooks: called around each layer's passes, in ``run``; for ``run_pair``, ``ChunkRun.add_hooks``.

    Raises:
        OptionError: an unknown kind of streams or random numbers.
        NodeStateError: ``"cuda"`` without an accelerator.
    """

    def __init__(
        self,
        streams: StreamKind | str | Streams[Op] = StreamKind.AUTO,
        *,
        rng: RngMode | str = RngMode.PLAIN,
        before_step: StepCallback | None = None,
        after_step: StepCallback | None = None,
        layer_hooks: LayerHooks | None = None,
    ) -> None:
        self._streams = streams if isinstance(streams, Streams) else make_streams(StreamKind(streams))
        self._rng = RngMode(rng)
        self._before_step = before_step
        self._after_step = after_step
        self._layer_hooks = hooks_of(layer_hooks)
        self._ranks = RankCheck()
        # On an accelerator the forward send runs on the communication stream, as Megatron-Core has it. Threads would
        # race in the pipeline's process group there, so they make all calls from the compute lane.
        self._programs = ProgramCache(post_forward_lane=1 if isinstance(self._streams, DeviceStreams) else 0)
        self._closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Give back what the runner holds; it cannot run afterwards."""
        self._closed = True
        self._programs.clear()
        self._ranks.close()

    def run(
        self,
        schedule: Schedule,
        chunk: ChunkPlan,
        batches: Sequence[Any],
        loss_grads: Sequence[Any] | None = None,
    ) -> RunResult:
        """Run a schedule; a schedule without ``B`` steps runs forward only, without recording graphs.

        Args:
            schedule: names microbatches 0 to ``len(batches) - 1``.
            chunk: the chunk.
            batches: what ``ChunkPlan.open`` takes, by microbatch.
            loss_grads: gradient of each microbatch's output, of its shape; None: ones.

        Raises:
            ScheduleError: the schedule is not valid for the chunk; nothing has run.
            RankMismatchError: another rank of an expert-parallel group holds another schedule.
            StepError: a step raised; names it. Gradients accumulated until then stay.
        """
        self._check_open()
        check_argument("chunk", chunk, ChunkPlan)
        trains = isinstance(schedule, Schedule) and any(step.phase is not Phase.F for step in schedule)
        with torch.set_grad_enabled(trains):
            try:
                check_argument("schedule", schedule, Schedule)
                check_argument("batches", batches, Sequence, Tensor)
                _check_loss_grads(loss_grads, batches)
                compiled = self._programs.of_schedule(
                    schedule, chunk, len(batches), Mode.TRAIN if trains else Mode.FORWARD
                )
                runs = [chunk.open(batch) for batch in batches]
                _add_hooks(runs, self._layer_hooks)
            except Exception:
                self._ranks.withdraw(chunk.exchange_groups)
                raise
            try:
                with chunk.run_context():
                    spans = self._perform(compiled, runs, chunk.exchange_groups, loss_grads)
                _check_drained(runs)
                return RunResult(
                    outputs=tuple(run.output for run in runs),
                    input_grads=tuple(run.input_grad for run in runs),
                    _program=compiled.program,
                    _spans=spans,
                )
            finally:
                for run in runs:
                    run.discard()

    def run_pair(
        self,
        schedule: PairSchedule,
        forward: ChunkRun | None,
        backward: ChunkRun | None,
        loss_grad: Any = None,
        calls: Mapping[Call, Callable[[], None]] | None = None,
    ) -> RunResult:
        """Run a pair: the forward of one chunk run against the backward of another, opened in an earlier call.

        The output is then at ``forward.output``, the input's gradient at ``backward.input_grad``, and both in what is
        returned, at the pair's microbatches 0 and 1; ``forward`` stays open.

        Args:
            schedule: ``F0`` steps of ``forward``, ``B1`` and ``W1`` steps of ``backward``.
            forward, backward: chunk runs, of the same chunk or of two; either may be None.
            loss_grad: gradient of the output of ``backward``; None: ones.
            calls: the trainer's functions around the passes, such as pipeline sends and receives.

        Raises:
            ScheduleError, RankMismatchError, StepError: as ``run``.
        """
        self._check_open()
        for name, run in (("forward", forward), ("backward", backward)):
            check_argument(name, run, ChunkRun, type(None))
        chunks = (None if forward is None else forward.plan, None if backward is None else backward.plan)
        groups = _groups_of(chunks)
        try:
            check_argument("schedule", schedule, PairSchedule)
            compiled = self._programs.of_pair(schedule, *chunks, frozenset(calls or ()))
        except Exception:
            self._ranks.withdraw(groups)
            raise
        present = chunks[0] or chunks[1]
        runs = [forward, backward]
        grads = [None, loss_grad]
        try:
            with nullcontext() if present is None else present.run_context():
                spans = self._perform(compiled, runs, groups, grads, calls)
            _check_drained([backward])
            return RunResult(
                outputs=(None if forward is None else forward.output, None),
                input_grads=(None, None if backward is None else backward.input_grad),
                _program=compiled.program,
                _spans=spans,
            )
        except BaseException:
            for run in runs:
                if run is not None:
                    run.discard()
            raise
        finally:
            if backward is not None:
                backward.discard()

    def _check_open(self) -> None:
        if self._closed:
            raise NodeStateError("this Runner is closed; make another one")

    def _perform(
        self,
        compiled: Compiled,
        runs: Sequence[ChunkRun | None],
        groups: Sequence[ProcessGroup],
        loss_grads: Sequence[Any] | None,
        calls: Mapping[Call, Callable[[], None]] | None = None,
    ) -> Spans:
        pending = self._ranks.issue(groups, compiled.fingerprint) if groups else None
        generators = StepGenerators() if self._rng is RngMode.PER_STEP else None
        performance = Performance(
            runs=runs,
            loss_grads=loss_grads,
            calls=calls,
            pending=pending,
            generators=generators,
            watch=None if compiled.is_watched else CollectiveWatch.of_process(),
            before_step=self._before_step,
            after_step=self._after_step,
        )
        try:
            spans = self._streams.run(compiled.program.ops, performance.perform)
        finally:
            if generators is not None:
                generators.leave()
        if pending is not None:
            pending.wait()
        compiled.is_watched = True
        return spans


def _add_hooks(runs: Iterable[ChunkRun], hooks: LayerHooks | None) -> None:
    if hooks is not None:
        for run in runs:
            for layer in range(len(run.plan.layers)):
                run.add_hooks(layer, hooks)


def _check_drained(runs: Sequence[ChunkRun | None]) -> None:
    """No weight gradient may be left to compute when a run ends."""
    pending = [
        f"microbatch {m}: {'; '.join(found)}"
        for m, run in enumerate(runs)
        if run is not None and (found := run.pending_wgrads())
    ]
    if pending:
        raise NodeStateError(f"the run ended with weight gradients that no W step computed: {'. '.join(pending)}")


def _check_loss_grads(loss_grads: Sequence[Any] | None, batches: Sequence[Any]) -> None:
    check_argument("loss_grads", loss_grads, Sequence, Tensor, type(None))
    if loss_grads is not None and len(loss_grads) != len(batches):
        raise ScheduleError(f"{len(loss_grads)} loss_grads for {len(batches)} batches; give one for each")


def _groups_of(chunks: Iterable[ChunkPlan | None]) -> list[ProcessGroup]:
    groups = [group for chunk in chunks if chunk is not None for group in chunk.exchange_groups]
    return list({id(group): group for group in groups}.values())


def _timeline(program: Program, spans: Spans) -> Timeline:
    return Timeline(
        tuple(
            Interval(op.step, LANES[op.lane], start, end)
            for op, (start, end) in zip(program.ops, spans, strict=True)
            if op.step is not None
        ),
        rules=program.rules,
    )
