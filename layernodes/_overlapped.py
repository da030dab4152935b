"""One overlapped action of torch's pipelining: what torch does for its two halves, the forward amid the backward."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Any, final

from torch import Tensor

from layernodes.plan.chunk_run import ChunkRun

if TYPE_CHECKING:
    from torch.distributed.pipelining.schedules import _Action, _PipelineContext

    from layernodes.pipelining import ChunkStage, Pair


@final
class Meeting:
    """One overlapped action: the backward calls for the forward, which runs both."""

    def __init__(self, forward: ChunkStage, backward: ChunkStage, pair: Pair, call_forward: Callable[[], None]) -> None:
        self._forward, self._backward, self._pair, self._call_forward = forward, backward, pair, call_forward
        self._waiting: tuple[ChunkRun, Tensor] | None = None

    def go_backward(self, run: ChunkRun, gradient: Tensor) -> None:
        """The backward has its gradient: now comes the forward, and with it both."""
        self._waiting = run, gradient
        self._backward.meet(None)
        self._forward.meet(self)
        try:
            self._call_forward()
        finally:
            self._forward.meet(None)

    def go_forward(self, run: ChunkRun) -> None:
        """The forward has its input: run both."""
        assert self._waiting is not None
        waiting, self._waiting = self._waiting, None
        self._forward.meet(None)
        self._backward.run_pair(self._pair, run, *waiting)


def followed_calls(runtime: Any) -> dict[str, Any]:
    """The arguments of the schedule's call that is under way, of which torch's context has not all."""
    step_microbatches = runtime._step_microbatches
    signature = inspect.signature(step_microbatches)
    call: dict[str, Any] = {}

    @wraps(step_microbatches)
    def followed(*args: Any, **kwargs: Any) -> Any:
        call.update(signature.bind(*args, **kwargs).arguments)
        try:
            return step_microbatches(*args, **kwargs)
        finally:
            call.clear()

    runtime._step_microbatches = followed
    return call


def run_overlapped(action: _Action, context: _PipelineContext, pair: Pair, call: dict[str, Any]) -> None:
    """What torch does for the two halves of the action, the forward in the midst of the backward."""
    runtime: Any = context.schedule_ref
    stages = {stage.stage_index: stage for stage in runtime._stages}
    assert action.sub_actions is not None
    forward, backward = action.sub_actions
    stage, index = stages[backward.stage_index], backward.microbatch_index

    def call_forward() -> None:
        _go_forward(runtime, context, call, stages, forward)

    meeting = Meeting(stages[forward.stage_index].submod, stage.submod, pair, call_forward)
    # Both halves' inputs have to be there before either begins.
    _wait(runtime.fwd_recv_ops, forward)
    _wait(runtime.bwd_recv_ops, backward)
    runtime.backward_counter[backward.stage_index] += 1
    stage.submod.meet(meeting)
    try:
        with stage.submod.called_from_here():
            stage.backward_one_chunk(
                index,
                loss=runtime._maybe_get_loss(stage, index),
                full_backward=True,
                last_backward=runtime.backward_counter[backward.stage_index] == runtime._n_microbatches,
            )
    finally:
        stage.submod.meet(None)
    if backward.stage_index - 1 in stages:  # the two stages of a V hand over without sending
        stages[backward.stage_index - 1].set_local_bwd_input(stage.get_local_bwd_output(index), index)


def _go_forward(
    runtime: Any, context: _PipelineContext, call: dict[str, Any], stages: dict[int, Any], action: _Action
) -> None:
    stage, index = stages[action.stage_index], action.microbatch_index
    assert index is not None
    arguments = () if context.arg_mbs is None else context.arg_mbs[index]
    keywords = {} if context.kwarg_mbs is None else context.kwarg_mbs[index]
    # Older versions of torch have neither option.
    saving = {"save_forward_output": call["return_outputs"]} if "return_outputs" in call else {}
    of_loss = {"loss_kwargs": call["loss_kwargs"]} if "loss_kwargs" in call else {}
    output = stage.forward_one_chunk(index, arguments, keywords, **saving)
    runtime._maybe_compute_loss(stage, output, context.target_mbs, index, **of_loss)
    if action.stage_index + 1 in stages:
        stages[action.stage_index + 1].set_local_fwd_input(output, index)


def _wait(received: dict[tuple[int, int], Any], action: _Action) -> None:
    assert action.microbatch_index is not None
    for work in received.pop((action.stage_index, action.microbatch_index), ()):
        work.wait()
