"""Pair schedules inside torch's own pipelining: ``ScheduleDualPipeV``'s ``OVERLAP_F_B`` actions really overlap.

torch cuts a model into stages and decides which microbatch a rank works on; an ``OVERLAP_F_B`` action names a forward
of one stage and a backward of another, which torch runs one after the other unless it is given a function. Ours runs
both as one pair schedule, slot by slot::

    stage's module   forward   open a chunk run, run its F steps, return its output as a node of torch's graph
                     backward  of that node: run the B (and W) steps of the same chunk run
    OVERLAP_F_B      backward of the one stage, which inside of its node does the forward of the other stage:
                     both chunk runs in one call of ``Runner.run_pair``

So any mixture of plain and overlapped actions works, and torch keeps its losses, sends, receives and hooks.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, final

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.pipelining import PipelineStage
from torch.nn import Module, ModuleList

from layernodes._overlapped import Meeting, followed_calls, run_overlapped
from layernodes.errors import NodeStateError, OptionError
from layernodes.plan import pairs
from layernodes.plan.chunk_plan import ChunkPlan
from layernodes.plan.chunk_run import ChunkRun
from layernodes.plan.runner import Runner
from layernodes.plan.schedule import PairSchedule
from layernodes.plan.shape import ChunkShape
from layernodes.streams import ThreadState

try:
    from torch.distributed.pipelining.schedules import OVERLAP_F_B, _PipelineScheduleRuntime
except ImportError:
    raise OptionError(
        f"torch {torch.__version__} has no OVERLAP_F_B actions in torch.distributed.pipelining; use a newer one "
        f"(layernodes is tested with 2.14)"
    ) from None

__all__ = ["ChunkStage", "overlap", "pipeline_stage"]

Pair = Callable[[ChunkShape | None, ChunkShape | None], PairSchedule]
"""Makes the pair schedule of a forward and a backward shape, either of which may be None."""


@final
class ChunkStage(Module):
    """A chunk plan as the module of a ``PipelineStage``.

    ``pipeline_stage`` makes the stage. Weight gradients come with the backward, or where the chunk's ``W`` steps are in
    the pair, and nothing is left for torch's weight actions.

    Args:
        chunk: of layer plans (``ChunkPlan.of``); the stage takes and returns one tensor of one shape.
        runner: runs it; one for all stages of a process.
    """

    def __init__(self, chunk: ChunkPlan, runner: Runner) -> None:
        super().__init__()
        self.layers = ModuleList(dict.fromkeys(plan.layer for plan in chunk.layers))
        self._chunk = chunk
        self._runner = runner
        self._made: dict[tuple[Hashable, ...], PairSchedule] = {}
        self._meeting: Meeting | None = None
        self._caller: ThreadState | None = None

    @property
    def shape(self) -> ChunkShape:
        """The chunk's shape."""
        return self._chunk.shape

    def forward(self, x: Tensor) -> Tensor:
        """The chunk's forward of one microbatch; ``x`` and the result have one shape."""
        run = self._chunk.open(x)
        if self._meeting is None:
            self.run_pair(pairs.serial, run, None, None)
        else:
            self._meeting.go_forward(run)
        if not torch.is_grad_enabled():
            run.discard()
            output: Tensor = run.output
            return output
        anchor = torch.empty(0, requires_grad=True)  # so that backward comes, whether the input needs it or not
        joined: Tensor = _Joint.apply(x, anchor, self, run)
        return joined

    def run_pair(
        self, pair: Pair, forward: ChunkRun | None, backward: ChunkRun | None, gradient: Tensor | None
    ) -> None:
        """Run chunk runs of this stage or of another, in one pair schedule, made once for each two chunks.

        Args:
            pair: makes the pair schedule of the two shapes.
            forward, backward: the chunk runs; either may be None.
            gradient: of the output of ``backward``.
        """
        plans = [None if run is None else run.plan for run in (forward, backward)]
        key = (pair, *plans)
        schedule = self._made.get(key)
        if schedule is None:
            schedule = self._made[key] = pair(*(None if plan is None else plan.shape for plan in plans))
        self._runner.run_pair(schedule, forward, backward, gradient)

    def meet(self, meeting: Meeting | None) -> None:
        """Let the next forward or backward of this stage be half of a pair; ``meeting`` None: of its own again."""
        self._meeting = meeting

    @contextmanager
    def called_from_here(self) -> Iterator[None]:
        """What goes backward meanwhile, and forward beside it, does so under this thread's autocast: for tensors on an
        accelerator autograd calls ``go_backward`` on a thread of its own, which has another."""
        self._caller = ThreadState()
        try:
            yield
        finally:
            self._caller = None

    def go_backward(self, run: ChunkRun, gradient: Tensor) -> Tensor | None:
        """Run the backward of a microbatch, beside a forward where one is waiting; returns the input's gradient.

        Args:
            run: the microbatch, whose forward is done.
            gradient: of its output.
        """
        with nullcontext() if self._caller is None else self._caller.entered(), torch.enable_grad():
            if self._meeting is None:
                self.run_pair(pairs.serial, None, run, gradient)
            else:
                self._meeting.go_backward(run, gradient)
        return run.input_grad


class _Joint(torch.autograd.Function):
    """Where torch's graph meets a chunk run."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, anchor: Tensor, stage: ChunkStage, run: ChunkRun) -> Tensor:
        ctx.stage, ctx.run = stage, run
        output: Tensor = run.output
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, None, None, None]:
        run, ctx.run = ctx.run, None
        if run is None:
            raise NodeStateError("a stage goes backward a second time for one microbatch; a run is used once")
        return ctx.stage.go_backward(run, gradient), None, None, None


@final
class _Stage(PipelineStage):
    """A stage over a ``ChunkStage``."""

    def backward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        chunk_stage: Any = self.submod
        with chunk_stage.called_from_here():
            return super().backward_one_chunk(*args, **kwargs)


def pipeline_stage(
    chunk: ChunkPlan,
    runner: Runner,
    stage_index: int,
    num_stages: int,
    example: Tensor,
    group: ProcessGroup | None = None,
) -> PipelineStage:
    """One of torch's pipeline stages over a chunk.

    Args:
        chunk, runner: as for ``ChunkStage``.
        stage_index, num_stages, group: as for ``PipelineStage``.
        example: a tensor of the shape, dtype and device of the stage's input and output. torch would else find shapes
            out with a forward and backward of its own, whose gradients would stay.
    """
    leaf = example.detach().requires_grad_(example.is_floating_point() or example.is_complex())
    return _Stage(
        ChunkStage(chunk, runner),
        stage_index,
        num_stages,
        example.device,
        input_args=leaf if stage_index else example.detach(),
        output_args=leaf,
        input_grads=example.detach() if stage_index else (None,),
        output_grads=example.detach(),
        group=group,
        dw_builder=lambda: lambda **_: None,
    )


def overlap(schedule: _PipelineScheduleRuntime, pair: Pair = pairs.combined_1f1b) -> None:
    """Let the ``OVERLAP_F_B`` actions of one of torch's pipeline schedules run as a pair schedule.

    Args:
        schedule: such as ``ScheduleDualPipeV``; the module of each of its stages is a ``ChunkStage``.
        pair: a built-in of ``layernodes.pairs``, or a function of one's own.

    Raises:
        OptionError: the schedule has no such actions, or a stage's module is something else.
    """
    if not isinstance(schedule, _PipelineScheduleRuntime):
        raise OptionError(
            f"{type(schedule).__name__} has no OVERLAP_F_B actions; use torch's ScheduleDualPipeV, or another schedule "
            f"that runs from a list of actions"
        )
    for stage in schedule._stages:
        if not isinstance(stage.submod, ChunkStage):
            raise OptionError(
                f"the module of stage {stage.stage_index} is {type(stage.submod).__name__}; make it a "
                f"ChunkStage(chunk, runner), so that it can be run slot by slot"
            )
    call = followed_calls(schedule)
    schedule.register_custom_function(OVERLAP_F_B, lambda action, context: run_overlapped(action, context, pair, call))
