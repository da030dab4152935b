"""Megatron-Core's schedule-plan nodes with what its own leave out, for use inside its own schedule plan.

``install()`` puts them in the place of ``TransformerLayerNode``, ``PreProcessNode`` and ``PostProcessNode``. They
differ in:

- storage is freed on proof (``layernodes.release``), not by slot name;
- an output without a gradient, or that requires none (a frozen embedding), takes no part in backward;
- a parameter that several nodes use gets one gradient a microbatch (``SharedParameters``);
- forward runs under the autocast that the plan was built under: Megatron-Core's combined step leaves it before it runs
  the plan, while its plain step runs forward, and no backward, under it;
- pre-process ends the decoder's call where the chunk has no decoder layer, and post-process leaves its norm to it;
- what a slot costs the host: no generator as context manager, no type of ``typing`` asked, no weak reference resolved
  and no view made viewless on the way from one slot to the next, where nobody asks for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Final

import torch
from megatron.core.models.common.utils import PostProcessNode, PreProcessNode, TransformerLayerNode
from megatron.core.pipeline_parallel.utils import make_viewless
from megatron.core.transformer.module import float16_to_fp32
from megatron.core.utils import nvtx_range_pop, nvtx_range_push
from torch import Tensor

from layernodes._megatron.chunk_ends import one_tensor, post_process, pre_process
from layernodes._megatron.given_input import GivenInput
from layernodes._megatron.shared_parameters import StandIns, shared_gradients_of, shared_parameters_of
from layernodes._megatron.streams import current_lane
from layernodes.autograd import accumulate, leaf_of, roots_among
from layernodes.release import release_inputs
from layernodes.stand_in import Site, deliver
from layernodes.state import carried
from layernodes.streams import autocasts

_LATE: Final = "layernodes_late_stand_ins"
_AUTOCASTS: Final = "layernodes_autocasts"
_INNER: Final = ("pre_dispatch_computation", "moe_dispatch")
"""Slots whose output never leaves their layer."""


class _PlanNode:
    """What our three nodes do otherwise than Megatron-Core's: forward in its contexts; backward over those outputs that
    take part in it."""

    _stand_ins: StandIns | None = None
    _deferred: frozenset[int] = frozenset()
    _is_drained = True
    name: str
    stream: Any
    event: Any
    layer_state: Any
    chunk_state: Any
    forward_impl: Callable[..., Any]
    _release_state: Callable[[], None]
    _sites: tuple[Site, ...] = ()  # where the slot holds parameters that other slots use too

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._autocasts = carried(self.chunk_state, _AUTOCASTS, autocasts)  # looked for once a microbatch

    def _forward(self, *inputs: Any) -> Any:
        self.output = self._on_stream("forward", self._run_forward, inputs)
        return self.output

    def _backward(self, *output_grad: Any) -> Any:
        outputs = self.output if isinstance(self.output, tuple) else (self.output,)
        used = self._on_stream("backward", self._run_backward, (outputs, output_grad))
        for gradient in used:  # it may come from another stream
            if gradient is not None:
                gradient.record_stream(self.stream)
        gradients = tuple(None if leaf is None else leaf.grad for leaf in self.inputs)
        self._release_state()
        return gradients[0] if len(gradients) == 1 else gradients

    def _on_stream(self, phase: str, run: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        """Run on the slot's stream, after what the event has recorded, and record it."""
        stream = self.stream() if callable(self.stream) else self.stream
        self.stream = stream
        text = f"{self.name} {phase}"
        self.event.wait(stream)
        nvtx_range_push(text)
        try:
            with torch.cuda.stream(stream):
                return run(*arguments)
        finally:
            nvtx_range_pop(text)
            self.event.record(stream)

    def _run_forward(self, *inputs: Any) -> Any:
        self.inputs = [None if value is None else leaf_of(value) for value in inputs]
        if not (self._sites or self._autocasts):
            return self.forward_impl(*self.inputs)
        with self._contexts():
            return self.forward_impl(*self.inputs)

    def _run_backward(self, outputs: tuple[Any, ...], output_grad: tuple[Any, ...]) -> tuple[Any, ...]:
        return self.default_backward_func(outputs, output_grad)

    def default_backward_func(self, outputs: tuple[Any, ...], output_grad: tuple[Any, ...]) -> tuple[Any, ...]:
        """Run autograd from ``outputs``; the gradients of the inputs and parameters accumulate."""
        roots, root_gradients = roots_among(outputs, output_grad)
        if roots:
            if self._stand_ins is not None:
                for stand_in, total in self._stand_ins.seeds(self._deferred):
                    roots.append(stand_in)
                    root_gradients.append(total)
            accumulate(roots, root_gradients)
        if self._stand_ins is not None:
            self._stand_ins.collect(later=self._deferred)
            if not self._deferred:
                self._stand_ins = None
            elif not self._is_drained:
                self.layer_state.__dict__.setdefault(_LATE, []).append(self._stand_ins)
                self._stand_ins = None
        return output_grad

    @contextmanager
    def _contexts(self) -> Iterator[None]:
        """What forward runs under, where it is anything."""
        with ExitStack() as stack:
            for kind, dtype in self._autocasts:
                stack.enter_context(torch.autocast(kind, dtype=dtype))
            if self._sites and torch.is_grad_enabled():
                self._stand_ins = stack.enter_context(shared_gradients_of(self.chunk_state).standing_in(self._sites))
            yield


class ProvingLayerNode(_PlanNode, TransformerLayerNode):  # type: ignore[misc]  # Megatron-Core has no type information
    """One slot of one layer and microbatch."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.is_mtp:
            shared = shared_parameters_of(self.chunk_state)
            self._sites = shared.mtp_all
            if self.name == "pre_dispatch_computation":
                self._sites += shared.mtp_first
        if self.delay_wgrad_compute and self._sites:
            self._deferred = frozenset(map(id, getattr(self.submodule, "wgrad_parameters", ())))
            self._is_drained = self.name in ("pre_dispatch_computation", "mlp")

    def backward_dw(self) -> None:
        """Run the slot's weight-gradient hooks, then hand on what they contributed to shared parameters."""
        super().backward_dw()
        if self._stand_ins is not None:
            self._stand_ins.collect()
            self._stand_ins = None
        if self.name == "mlp":  # its hooks include those of the slots after it, which nobody drains
            for stand_ins in self.layer_state.__dict__.pop(_LATE, ()):
                stand_ins.collect()

    def detach(self, t: Tensor) -> Tensor:
        """Cut ``t`` from the graph; backward hands the gradient of what is returned to ``t``."""
        detached: Tensor = leaf_of(t)
        self.before_detached += (t,)
        self.detached += (detached,)
        return detached

    @staticmethod
    def _resolve_free_input(*_: Any) -> bool:
        return False  # never by name: see _run_forward

    def _run_forward(self, *inputs: Any) -> Any:
        output = super()._run_forward(*inputs)
        if self.name not in _INNER and isinstance(output, Tensor):
            output = make_viewless(output)  # it may be the chunk's output, which a pipeline empties once it is sent
        frees_input = getattr(self.submodule, "frees_input", None)
        if frees_input is not None and frees_input():
            release_inputs(inputs, self.inputs, current_lane(inputs[0]))
        return output

    def _run_backward(self, outputs: tuple[Any, ...], output_grad: tuple[Any, ...]) -> tuple[Any, ...]:
        gradients = output_grad + tuple(cut.grad for cut in self.detached)
        return self.default_backward_func(outputs + self.before_detached, gradients)


class ChunkPreProcessNode(_PlanNode, PreProcessNode):  # type: ignore[misc]  # Megatron-Core has no type information
    """The chunk's pre-process."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._sites = shared_parameters_of(self.chunk_state).pre_process
        self._given = GivenInput(self.chunk_state.decoder_input)
        self._leaf: Tensor | None = None

    def forward_impl(self) -> Tensor:
        """Embed, or take what the pipeline received or the batch gives, and set up what the layers read."""
        if self.model.pre_process:
            given = self._leaf = leaf_of(self.chunk_state.decoder_input)
            if self._given.has_graph:
                shared_gradients_of(self.chunk_state).finish = self._given.keep
        else:
            given = self.model.decoder.input_tensor
        hidden: Tensor = make_viewless(pre_process(self.model, self.chunk_state, given))
        return hidden

    def _run_backward(self, outputs: tuple[Any, ...], output_grad: tuple[Any, ...]) -> tuple[Any, ...]:
        used = super()._run_backward(outputs, output_grad)
        self._given.hand_back(None if self._leaf is None else self._leaf.grad)
        shared_gradients_of(self.chunk_state).finish = deliver  # a weight gradient of the first layer may follow
        return used


class ChunkPostProcessNode(_PlanNode, PostProcessNode):  # type: ignore[misc]  # Megatron-Core has no type information
    """The chunk's post-process: logits or loss."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._sites = shared_parameters_of(self.chunk_state).post_process

    def forward_impl(self, hidden_states: Tensor) -> Tensor:
        """Run the chunk's tail; Megatron-Core's combined 1F1B expects an fp32 loss."""
        output = one_tensor(post_process(self.model, self.chunk_state, hidden_states))
        loss: Tensor = make_viewless(float16_to_fp32(output))
        return loss
