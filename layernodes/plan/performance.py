"""One run of a program: performs its steps and calls, and knows which are done."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, final

from torch.autograd import profiler

from layernodes.errors import RankMismatchError, StepError, StreamOrderError
from layernodes.lane import Lane
from layernodes.plan.chunk_run import ChunkRun
from layernodes.plan.collectives import CollectiveWatch
from layernodes.plan.program import Call, Op
from layernodes.plan.ranks import PendingCheck
from layernodes.plan.rng import StepGenerators
from layernodes.plan.step import Step
from layernodes.slots import Phase

StepCallback = Callable[[Step], None]


@final
@dataclass(kw_only=True, slots=True)
class Performance:
    """One run of a program.

    Attributes:
        runs: the chunk run of each microbatch; of a pair, the forward's and the backward's.
        loss_grads: gradient of each microbatch's output; None: ones.
        calls: the trainer's functions.
        pending: the ranks' comparison of schedules, to be awaited before the first communication step.
        generators: what random numbers are drawn from in mode ``per_step``.
        watch: notes on which streams collectives are issued; None where an earlier run has shown it.
        before_step, after_step: called around each step.
        completed: texts of the steps done, in order of completion.
    """

    runs: Sequence[ChunkRun | None]
    loss_grads: Sequence[Any] | None
    calls: Mapping[Call, Callable[[], None]] | None
    pending: PendingCheck | None
    generators: StepGenerators | None
    watch: CollectiveWatch | None
    before_step: StepCallback | None
    after_step: StepCallback | None
    completed: list[str] = field(default_factory=list)

    def perform(self, op: Op, lane: Lane | None) -> None:
        """Run one step or call; whatever it raises surfaces as StepError."""
        try:
            if self.pending is not None and op.communicates:
                self.pending.wait()
            if self.watch is not None:
                self.watch.begin(op)
            if profiler._is_profiler_enabled:  # on any thread; that of the thread itself may be unaware
                with profiler.record_function(op.text):
                    self._run(op, lane)
            else:
                self._run(op, lane)
            if self.watch is not None:
                self.watch.end(op)
        except (RankMismatchError, StreamOrderError):
            raise
        except Exception as error:
            raise self._step_error(op, error) from error
        self.completed.append(op.text)

    def _run(self, op: Op, lane: Lane | None) -> None:
        step = op.step
        if step is None:
            if self.calls is not None and op.call is not None:
                self.calls[op.call]()
            return
        if self.before_step is not None:
            self.before_step(step)
        run = self.runs[op.run]
        assert run is not None
        phase = step.phase
        if phase is Phase.F:
            if self.generators is not None and run.plan.places[op.place].touches_rng:
                self.generators.enter(step)
            run.forward(op.place, lane)
            if op.ends_forward:
                run.end_forward()
        elif phase is Phase.B:
            if op.begins_backward:
                run.begin_backward(None if self.loss_grads is None else self.loss_grads[op.run])
            run.backward(op.place, lane)
            if op.ends_backward:
                run.end_backward()
        else:
            run.weight_gradients(op.place)
        if self.after_step is not None:
            self.after_step(step)

    def _step_error(self, op: Op, error: Exception) -> StepError:
        layer, microbatch = (None, 0) if op.step is None else (op.step.layer, op.step.microbatch)
        return StepError(
            f"{op.text} raised {type(error).__name__}: {error} (layer {layer}, microbatch {microbatch}; "
            f"{len(self.completed)} steps had completed)",
            step=op.text,
            layer=layer,
            microbatch=microbatch,
            completed=self.completed,
        )
