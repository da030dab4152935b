"""Inside Megatron-Core's training loop: its trainer, a schedule of the user's choice.

Megatron-Core's combined-1F1B functions ask the model for a schedule plan of each microbatch
(``build_schedule_plan``) and run the forward of one against the backward of another
(``type(plan).run(forward, backward, b_grad=..., pre_forward=..., ...)``). ``schedule()`` makes the model return plans
of ours:

    on entering            check configuration and layers; build chunk plans; choose and check the pair schedules of all
                           chunks that may meet
    build_schedule_plan    open a chunk run for the microbatch, on the model's chunk plan
    run                    run the pair schedule of the two chunks, the trainer's functions as calls around the passes;
                           hand the gradient of the chunk's input to the tensor that it was given
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from os import PathLike
from types import TracebackType
from typing import Any, Self, final

import torch
from torch import Tensor
from torch.nn import Module

from layernodes._megatron.chunk_ends import one_tensor
from layernodes._megatron.constraints import raise_violations, recompute_notes, training_violations
from layernodes._megatron.given_input import GivenInput
from layernodes._megatron.training import (
    AbstractSchedulePlan,
    autocast_context,
    backward_timer,
    hooked_module,
    new_event,
    no_wrappers_left,
    overlap_flags,
    schedule_plans_built_by,
)
from layernodes.errors import NodeStateError
from layernodes.plan.arguments import check_argument
from layernodes.plan.chunk_plan import ChunkPlan
from layernodes.plan.chunk_run import ChunkRun
from layernodes.plan.grouping import Group
from layernodes.plan.layer_hooks import LayerHook, LayerHooks, hooks_of
from layernodes.plan.layer_plan import WgradMode
from layernodes.plan.pair_rule import PairRule, rule_of
from layernodes.plan.program import Call
from layernodes.plan.registry import LayerRegistry, NodeFactory, SlotKey, registry_of
from layernodes.plan.runner import Runner
from layernodes.plan.schedule import PairSchedule
from layernodes.plan.stream_kind import StreamKind
from layernodes.plan.validate import validate_pair


def schedule(
    models: Module | Sequence[Module],
    order: str | PairRule | PairSchedule | PathLike[str] = "combined_1f1b",
    *,
    wgrad: WgradMode | str = WgradMode.OFF,
    streams: StreamKind | str = StreamKind.AUTO,
    split_combine: bool = False,
    nodes: dict[SlotKey, NodeFactory] | None = None,
    registry: LayerRegistry | None = None,
    group: Group = None,
    layer_hooks: LayerHooks | None = None,
) -> TrainingSchedule:
    """Train under a schedule of your choice: a context around Megatron-Core's ``get_forward_backward_func()`` and its
    calls.

    Args:
        models: the model chunk, or all chunks of this rank (virtual pipelining), as given to Megatron-Core.
        order: name of a built-in pair schedule (``"combined_1f1b"``, ``"serial"``, ``"early_release"``, ...), a
            function of the two shapes (either may be None: called on entering for all chunks that may meet), or, for
            chunks of equal shape, a ``PairSchedule`` (``optimize_pair`` makes one) or a ``.txt`` or ``.json`` file of
            one. All but a name place the weight gradients (``W``) themselves.
        wgrad: ``"auto"`` defers weight gradients; those of the first layer then run after the backward send.
        streams: as for ``Runner``.
        split_combine, nodes, registry, group: as for ``ChunkPlan.build``.
        layer_hooks: called around each layer's passes, as FSDP-style gather and release need it.

    Leave ``overlap_moe_expert_parallel_comm`` and ``delay_wgrad_compute`` off in the configuration: the context sets
    both on the existing configuration objects, of every chunk and inner layer, and restores them. Evaluation
    (``forward_only=True``) inside the context runs the plain model, as in Megatron-Core.

    Raises:
        UnsupportedLayerError: a model, layer or configuration that is not handled; on entering, with every reason in
            ``violations``.
        OptionError, ScheduleError: an unknown name; on entering, a schedule not valid for chunks that may meet.
        NodeStateError: on entering, inside another ``schedule()``.

    Example::

        with layernodes.megatron.schedule(model, "combined_1f1b", wgrad="auto"):
            losses = get_forward_backward_func()(forward_step_func=forward_step, model=model, ...)
    """
    check_argument("models", models, Module, Sequence)
    chunks = [models] if isinstance(models, Module) else list(models)
    return TrainingSchedule(
        chunks,
        rule_of(order, WgradMode(wgrad)),
        WgradMode(wgrad),
        StreamKind(streams),
        partial(ChunkPlan.build, nodes=nodes, split_combine=split_combine, wgrad=wgrad, registry=registry, group=group),
        registry_of(registry),
        hooks_of(layer_hooks),
    )


@final
class TrainingSchedule:
    """What ``schedule()`` returns: a context manager."""

    def __init__(
        self,
        models: Sequence[Module],
        rule: PairRule,
        wgrad: WgradMode,
        streams: StreamKind,
        build: Callable[[Module], ChunkPlan],
        registry: LayerRegistry,
        layer_hooks: LayerHooks | None,
    ) -> None:
        self._models = models
        self._rule = rule
        self._wgrad = wgrad
        self._kind = streams
        self._layer_hooks = layer_hooks
        self._build = build
        self._registry = registry
        self._chunks: dict[Module, ChunkPlan] = {}
        self._schedules: dict[tuple[ChunkPlan | None, ChunkPlan | None], PairSchedule] = {}
        self._runner: Runner | None = None
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        if self._runner is not None:
            raise NodeStateError("this schedule() is entered already; make one for each context")
        delays = self._wgrad is WgradMode.AUTO
        known = self._registry.find
        raise_violations(
            training_violations(self._models, delay_wgrad=delays, is_known=lambda layer: bool(known(layer)))
        )
        for note in recompute_notes(self._models):
            warnings.warn(note, stacklevel=2)
        with ExitStack() as stack:
            stack.enter_context(schedule_plans_built_by(self._plan_of))
            stack.enter_context(no_wrappers_left(self._models))
            stack.enter_context(overlap_flags(self._models, delay_wgrad=delays))
            stack.callback(self._chunks.clear)
            stack.callback(self._schedules.clear)
            for model in self._models:
                chunk = self._build(model)
                self._chunks[chunk.model] = chunk
            self._choose_schedules()
            self._runner = stack.enter_context(Runner(self._kind))
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._runner = None
        self._stack.close()

    @property
    def chunks(self) -> tuple[ChunkPlan, ...]:
        """The plans of the model chunks, in the order given; none outside the context."""
        return tuple(self._chunks.values())

    def _choose_schedules(self) -> None:
        """The pair schedule of every two chunks that may meet, checked before the first of them runs."""
        sides: list[ChunkPlan | None] = [None, *self._chunks.values()]
        for forward in sides:
            for backward in sides:
                shapes = [None if chunk is None else chunk.shape for chunk in (forward, backward)]
                if any(shapes):
                    chosen = self._rule(*shapes)
                    validate_pair(chosen, *shapes)
                    self._schedules[forward, backward] = chosen

    def _plan_of(self, model: Any, **batch: Any) -> ChunkSchedulePlan:
        """``build_schedule_plan`` of the model, its arguments by name."""
        chunk = self._chunks.get(model)
        if chunk is None:
            raise NodeStateError("this model was not given to schedule(); give it all model chunks of this rank")
        given = GivenInput.of(model, batch)
        chunk_run = chunk.open(batch)
        if given.has_graph:
            chunk_run.shared.finish = given.keep
        if self._layer_hooks is not None:
            for layer in range(len(chunk.layers)):
                chunk_run.add_hooks(layer, self._layer_hooks)
        return ChunkSchedulePlan(self, model, chunk_run, given)

    def run_pair(
        self, forward: ChunkSchedulePlan | None, backward: ChunkSchedulePlan | None, gradient: Tensor | None, calls: Any
    ) -> Tensor | None:
        """Run one pair; returns the forward's output, as a leaf that requires grad."""
        assert self._runner is not None
        f_run, b_run = (None if plan is None else plan.chunk_run for plan in (forward, backward))
        chosen = self._schedules[None if f_run is None else f_run.plan, None if b_run is None else b_run.plan]
        present = forward or backward
        assert present is not None
        with backward_timer(None if backward is None else backward.model):
            with torch.enable_grad(), autocast_context(present.model):
                self._runner.run_pair(chosen, f_run, b_run, gradient, calls)
            if backward is not None:
                backward.given.hand_back(backward.chunk_run.input_grad)
        return None if forward is None else forward.take_output()


@final
class ChunkSchedulePlan(AbstractSchedulePlan):  # type: ignore[misc]  # Megatron-Core has no type information
    """One microbatch on one chunk, as Megatron-Core's trainer sees it.

    Attributes:
        vp_stage: the chunk's virtual-pipeline stage.
        event: what the trainer's loss node synchronizes on.
    """

    def __init__(self, session: TrainingSchedule, model: Any, chunk_run: ChunkRun, given: GivenInput) -> None:
        self._session = session
        self.model = model
        self.chunk_run = chunk_run
        self.given = given
        self.vp_stage = model.vp_stage
        self.event = new_event()

    def take_output(self) -> Tensor:
        """What the chunk returned, for the trainer's loss node or the next stage; from there it may be deallocated."""
        output = one_tensor(self.chunk_run.output)
        deallocates = self.model.config.deallocate_pipeline_outputs and not self.model.post_process
        handed = self.chunk_run.hand_over() if deallocates else None
        return output.detach().requires_grad_(True) if handed is None else handed

    def num_layers(self) -> int:
        """How many layers the chunk has, decoder and MTP."""
        return len(self.chunk_run.plan.layers)

    def get_layer(self, i: int) -> LayerSchedulePlan:
        """Layer ``i`` of this microbatch."""
        return LayerSchedulePlan(self.chunk_run, range(self.num_layers())[i])

    @staticmethod
    def run(
        f_schedule_plan: ChunkSchedulePlan | None,
        b_schedule_plan: ChunkSchedulePlan | None,
        b_grad: Tensor | None = None,
        pre_forward: Callable[..., Any] | None = None,
        pre_backward: Callable[..., Any] | None = None,
        post_forward: Callable[..., Any] | None = None,
        post_backward: Callable[..., Any] | None = None,
    ) -> Tensor | None:
        """Run the forward of one plan against the backward of another; Megatron-Core's signature."""
        present = f_schedule_plan or b_schedule_plan
        if present is None:
            return None
        calls: dict[Call, Callable[[], None]] = {}
        if f_schedule_plan is not None:
            forward, stage = f_schedule_plan, f_schedule_plan.vp_stage
            if pre_forward is not None:
                calls[Call.PRE_FORWARD] = partial(pre_forward, stage)
            if post_forward is not None:
                calls[Call.POST_FORWARD] = lambda: post_forward(forward.chunk_run.value, stage)
        if b_schedule_plan is not None:
            backward, b_stage = b_schedule_plan, b_schedule_plan.vp_stage
            if pre_backward is not None:
                calls[Call.PRE_BACKWARD] = partial(pre_backward, b_stage)
            if post_backward is not None:
                calls[Call.POST_BACKWARD] = lambda: post_backward(backward.chunk_run.gradient, b_stage)
        return present._session.run_pair(f_schedule_plan, b_schedule_plan, b_grad, calls)


@final
class LayerSchedulePlan:
    """One layer of one microbatch, as Megatron-Core's trainer sees it.

    Attributes:
        layer: the layer.
    """

    def __init__(self, chunk_run: ChunkRun, index: int) -> None:
        self._chunk_run = chunk_run
        self._index = index
        self.layer = chunk_run.plan.layers[index].layer

    def set_fsdp_reshard_hooks(self, post_forward_hook: LayerHook, post_backward_hook: LayerHook) -> None:
        """Call these, with the transformer layer, after the layer's forward and after its backward."""
        module = hooked_module(self.layer)
        hooks = LayerHooks(
            after_forward=lambda _: post_forward_hook(module), after_backward=lambda _: post_backward_hook(module)
        )
        self._chunk_run.add_hooks(self._index, hooks)
