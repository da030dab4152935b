"""Megatron-Core's schedule-plan nodes with what its own leave out, for use inside its own schedule plan.

``install()`` puts them in the place of ``TransformerLayerNode``, ``PreProcessNode`` and ``PostProcessNode``. They
differ in:

- storage is freed on proof (``layernodes.release``), not by slot name;
- an output without a gradient, or that requires none (a frozen embedding), takes no part in backward;
- a parameter that several nodes use gets one gradient a microbatch (``SharedParameters``);
- forward runs under the autocast that the plan was built under: Megatron-Core's combined step leaves it before it runs
  the plan, while its plain step runs forward, and no backward, under it;
- pre-process ends the decoder's call where the chunk has no decoder layer, and post-process leaves its norm to it.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any, Final

import torch
from megatron.core.models.common.utils import PostProcessNode, PreProcessNode, TransformerLayerNode
from megatron.core.transformer.module import float16_to_fp32
from torch import Tensor
from torch.autograd import Variable

from layernodes._megatron.chunk_ends import post_process, pre_process
from layernodes._megatron.shared_parameters import StandIns, shared_gradients_of, shared_parameters_of
from layernodes._megatron.streams import current_lane
from layernodes.release import release_inputs
from layernodes.stand_in import Site
from layernodes.state import carried
from layernodes.streams import autocasts

_LATE: Final = "layernodes_late_stand_ins"
_AUTOCASTS: Final = "layernodes_autocasts"


class _PlanNode:
    """What our three nodes do otherwise than Megatron-Core's: forward in its contexts; backward over those outputs that
    take part in it."""

    _stand_ins: StandIns | None = None
    _deferred: frozenset[int] = frozenset()
    _is_drained = True
    layer_state: Any
    chunk_state: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._autocasts = carried(self.chunk_state, _AUTOCASTS, autocasts)  # looked for once a microbatch

    def default_backward_func(self, outputs: tuple[Any, ...], output_grad: tuple[Any, ...]) -> tuple[Any, ...]:
        """Run autograd from ``outputs``; the gradients of the inputs and parameters accumulate."""
        pairs = [
            (output, gradient)
            for output, gradient in zip(outputs, output_grad, strict=True)
            if isinstance(output, Tensor) and output.requires_grad and gradient is not None
        ]
        if pairs:
            if self._stand_ins is not None:
                pairs += self._stand_ins.seeds(self._deferred)
            Variable._execution_engine.run_backward(
                tensors=tuple(output for output, _ in pairs),
                grad_tensors=tuple(gradient for _, gradient in pairs),
                keep_graph=False,
                create_graph=False,
                inputs=(),
                allow_unreachable=True,
                accumulate_grad=True,
            )
        if self._stand_ins is not None:
            self._stand_ins.collect(later=self._deferred)
            if not self._deferred:
                self._stand_ins = None
            elif not self._is_drained:
                self.layer_state.__dict__.setdefault(_LATE, []).append(self._stand_ins)
                self._stand_ins = None
        return output_grad

    def _contexts(self, chunk_state: Any, sites: tuple[Site, ...]) -> AbstractContextManager[Any]:
        """What forward runs under."""
        stands_in = bool(sites) and torch.is_grad_enabled()
        if not (stands_in or self._autocasts):
            return nullcontext()
        stack = ExitStack()
        for kind, dtype in self._autocasts:
            stack.enter_context(torch.autocast(kind, dtype=dtype))
        if stands_in:
            self._stand_ins = stack.enter_context(shared_gradients_of(chunk_state).standing_in(sites))
        return stack


class ProvingLayerNode(_PlanNode, TransformerLayerNode):  # type: ignore[misc]  # Megatron-Core has no type information
    """One slot of one layer and microbatch."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._sites: tuple[Site, ...] = ()
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

    @staticmethod
    def _resolve_free_input(*_: Any) -> bool:
        return False  # never by name: see _forward

    def _forward(self, *inputs: Any) -> Any:
        with self._contexts(self.chunk_state, self._sites):
            output = super()._forward(*inputs)
        frees_input = getattr(self.submodule, "frees_input", None)
        if frees_input is not None and frees_input():
            release_inputs(inputs, self.inputs, current_lane(inputs[0]))
        return output


class ChunkPreProcessNode(_PlanNode, PreProcessNode):  # type: ignore[misc]  # Megatron-Core has no type information
    """The chunk's pre-process."""

    def _forward(self, *inputs: Any) -> Any:
        sites = shared_parameters_of(self.chunk_state).pre_process
        with self._contexts(self.chunk_state, sites):
            return super()._forward(*inputs)

    def forward_impl(self) -> Tensor:
        """Embed, or take what the pipeline received, and set up what the layers read."""
        return pre_process(
            self.model, self.chunk_state, None if self.model.pre_process else self.model.decoder.input_tensor
        )


class ChunkPostProcessNode(_PlanNode, PostProcessNode):  # type: ignore[misc]  # Megatron-Core has no type information
    """The chunk's post-process: logits or loss."""

    def _forward(self, *inputs: Any) -> Any:
        sites = shared_parameters_of(self.chunk_state).post_process
        with self._contexts(self.chunk_state, sites):
            return super()._forward(*inputs)

    def forward_impl(self, hidden_states: Tensor) -> Tensor:
        """Run the chunk's tail; Megatron-Core's combined 1F1B expects an fp32 loss."""
        loss: Tensor = float16_to_fp32(post_process(self.model, self.chunk_state, hidden_states))
        return loss
