"""One slot of one microbatch: forward once, backward once, then empty.

A slot's graph is its own: inputs are detached from the slot before, and backward hands their gradients to it.

    forward    inner = detached copies of the previous outputs, each a leaf where that output requires grad
               outputs = node(self, inner)
               free the storage that inner shares with the previous outputs, on proof
    backward   run autograd from the outputs and from the handoffs written, with the gradients that arrived for them
               return the gradients of inner
    weight_gradients    compute and deliver what that deferred
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

import torch
from torch import Tensor
from torch.autograd import Variable

from layernodes._megatron.shared_parameters import SharedGradients, StandIns
from layernodes.errors import NodeStateError
from layernodes.nodes import WgradHook
from layernodes.release import release_inputs
from layernodes.wgrad import Site

Values = tuple[Any, ...]
"""What passes between slots: mostly tensors; a slot may also return integers' tensors or None."""


class LayerState:
    """Carries the handoffs of one layer and microbatch."""


@final
class SlotRun:
    """The context of a node in our runner: one slot of one microbatch. Satisfies ``NodeContext``."""

    __slots__ = (
        "_deferred",
        "_detached",
        "_inputs",
        "_originals",
        "_outputs",
        "_stand_ins",
        "bwd_dw_callables",
        "chunk_state",
        "is_first_layer",
        "is_last_layer",
        "is_mtp",
        "layer_state",
    )

    def __init__(
        self,
        layer_state: object,
        chunk_state: object,
        hook: WgradHook | None,
        *,
        deferred: frozenset[int] = frozenset(),
        is_first_layer: bool,
        is_last_layer: bool,
        is_mtp: bool,
    ) -> None:
        self.layer_state = layer_state
        self.chunk_state = chunk_state
        self.is_first_layer = is_first_layer
        self.is_last_layer = is_last_layer
        self.is_mtp = is_mtp
        self.bwd_dw_callables: tuple[WgradHook, ...] = () if hook is None else (hook,)
        self._deferred = deferred  # ids of the parameters whose gradients are still to come after backward
        self._inputs: Values = ()
        self._outputs: Values | None = None
        self._originals: list[Tensor] = []
        self._detached: list[Tensor] = []
        self._stand_ins: StandIns | None = None

    def detach(self, t: Tensor) -> Tensor:
        """Cut ``t`` from the graph; backward hands the gradient of what is returned to ``t``."""
        detached = t.detach()
        detached.requires_grad_(t.requires_grad)
        self._originals.append(t)
        self._detached.append(detached)
        return detached

    def forward(
        self,
        run_node: Callable[..., Any],
        previous: Values,
        *,
        frees_input: bool,
        stream: torch.Stream | None,
        sites: tuple[Site, ...],
        shared: SharedGradients,
    ) -> Values:
        """Run the node on what the previous slot returned, and return what it returned.

        Args:
            run_node: the node, called ``run_node(self, *inputs)``.
            previous: the previous slot's outputs.
            frees_input: whether the node permits freeing its inputs.
            stream: the accelerator stream that this slot runs on; None on a CPU.
            sites: where the node's modules hold parameters that other nodes of the chunk use too.
            shared: the microbatch's sums of gradients of such parameters.
        """
        inner = tuple(_leaf(t) if isinstance(t, Tensor) else t for t in previous)
        self._inputs = inner
        if sites and torch.is_grad_enabled():
            with shared.standing_in(sites) as self._stand_ins:
                returned = run_node(self, *inner)
        else:
            returned = run_node(self, *inner)
        self._outputs = returned if isinstance(returned, tuple) else (returned,)
        if frees_input:
            release_inputs(previous, inner, stream)
        return self._outputs

    def backward(self, gradients: Values) -> Values:
        """Run autograd for this slot and return the gradients of its inputs, None where there is none.

        Args:
            gradients: of the slot's outputs, in their order; None for an output that nobody used.
        """
        outputs = self._outputs
        if outputs is None:
            raise NodeStateError("backward of a slot whose forward has not run; run its F step first")
        roots: list[Tensor] = []
        root_gradients: list[Tensor] = []
        for output, gradient in zip(outputs, gradients, strict=True):
            if gradient is not None and isinstance(output, Tensor) and output.requires_grad:
                roots.append(output)
                root_gradients.append(gradient)
        for original, detached in zip(self._originals, self._detached, strict=True):
            if detached.grad is not None:
                roots.append(original)
                root_gradients.append(detached.grad)
        # Every reference of ours goes before autograd runs, so that it can free each buffer after its last use.
        inputs, stand_ins = self._inputs, self._stand_ins
        self.close()
        if roots:
            Variable._execution_engine.run_backward(
                tuple(roots),
                tuple(root_gradients),
                keep_graph=False,
                create_graph=False,
                inputs=(),
                allow_unreachable=True,
                accumulate_grad=True,
            )
        if stand_ins is not None:
            stand_ins.collect(later=self._deferred)
            self._stand_ins = stand_ins if self._deferred else None
        return tuple(t.grad if isinstance(t, Tensor) else None for t in inputs)

    def weight_gradients(self) -> None:
        """Compute and deliver what backward deferred."""
        hooks, self.bwd_dw_callables = self.bwd_dw_callables, ()
        if self._outputs is not None or not hooks:
            raise NodeStateError("W of a slot before its B, or a second time; run it once, after its B")
        for hook in hooks:
            hook.backward_dw()
        if self._stand_ins is not None:
            self._stand_ins.collect()
            self._stand_ins = None

    @property
    def owes_wgrads(self) -> bool:
        """Whether backward has run and what it deferred is still to be computed."""
        return self._outputs is None and bool(self.bwd_dw_callables)

    def close(self) -> None:
        """Forget everything; a second backward is an error."""
        self._inputs = ()
        self._outputs = None
        self._originals = []
        self._detached = []
        self._stand_ins = None


def _leaf(tensor: Tensor) -> Tensor:
    leaf = tensor.detach()
    if tensor.requires_grad:
        leaf.requires_grad_(True)
    return leaf
