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
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor

from layernodes._megatron.shared_parameters import SharedGradients, StandIns
from layernodes.autograd import accumulate, leaf_of, roots_among
from layernodes.errors import NodeStateError
from layernodes.lane import Lane
from layernodes.nodes import WgradHook
from layernodes.release import release_inputs

if TYPE_CHECKING:
    from layernodes.plan.chunk_places import ChunkPlace

Values = tuple[Any, ...]
"""What passes between slots: mostly tensors; a slot may also return integers' tensors or None."""


class LayerState:
    """Carries the handoffs of one layer and microbatch."""


@final
class SlotRun:
    """The context of a node in our runner: one slot of one microbatch. Satisfies ``NodeContext``."""

    __slots__ = (
        "_cuts",
        "_inputs",
        "_outputs",
        "_place",
        "_stand_ins",
        "bwd_dw_callables",
        "chunk_state",
        "is_first_layer",
        "is_last_layer",
        "is_mtp",
        "layer_state",
    )

    def __init__(
        self, place: ChunkPlace, layer_state: object, chunk_state: object, hook: WgradHook | None = None
    ) -> None:
        self.layer_state = layer_state
        self.chunk_state = chunk_state
        self.is_first_layer = place.is_first_layer
        self.is_last_layer = place.is_last_layer
        self.is_mtp = place.is_mtp
        self.bwd_dw_callables: tuple[WgradHook, ...] = () if hook is None else (hook,)
        self._place = place
        self._inputs: Values = ()
        self._outputs: Values | None = None
        self._cuts: list[tuple[Tensor, Tensor]] | None = None
        self._stand_ins: StandIns | None = None

    def detach(self, t: Tensor) -> Tensor:
        """Cut ``t`` from the graph; backward hands the gradient of what is returned to ``t``."""
        detached: Tensor = leaf_of(t)
        if self._cuts is None:
            self._cuts = []
        self._cuts.append((t, detached))
        return detached

    def forward(self, previous: Values, lane: Lane | None, shared: SharedGradients, *, keeps_input: bool) -> Values:
        """Run the place's node on what the previous slot returned, and return what it returned.

        Args:
            previous: the previous slot's outputs.
            lane: the lane that this slot runs on, where its memory needs to be told; None on a CPU.
            shared: the microbatch's sums of gradients of parameters that several nodes use.
            keeps_input: whether ``previous`` is the caller's own, not ours to free.
        """
        place = self._place
        run_node = place.node
        assert run_node is not None
        if lane is not None:
            lane.uses(previous)
        inner = (leaf_of(previous[0]),) if len(previous) == 1 else tuple(map(leaf_of, previous))
        self._inputs = inner
        sites = place.sites
        if place.precision is not None or (sites and torch.is_grad_enabled()):
            returned = self._run_in_contexts(run_node, inner, shared)
        else:
            returned = run_node(self, *inner)
        # A tuple of our own: who keeps the node's keeps what is in it, and release_inputs sees that.
        self._outputs = (*returned,) if isinstance(returned, tuple) else (returned,)
        if place.frees_input and not keeps_input:
            release_inputs(previous, inner, lane, owns_outers=True)
        return self._outputs

    def _run_in_contexts(self, run_node: Callable[..., Any], inner: Values, shared: SharedGradients) -> Any:
        place = self._place
        with ExitStack() as stack:
            if place.precision is not None:
                stack.enter_context(place.precision())
            if place.sites and torch.is_grad_enabled():
                self._stand_ins = stack.enter_context(shared.standing_in(place.sites))
            return run_node(self, *inner)

    def backward(self, gradients: Values, lane: Lane | None) -> Values:
        """Run autograd for this slot and return the gradients of its inputs, None where there is none.

        Args:
            gradients: of the slot's outputs, in their order; None for an output that nobody used.
            lane: as in ``forward``.
        """
        outputs = self._outputs
        if outputs is None:
            raise NodeStateError("backward of a slot whose forward has not run; run its F step first")
        roots, root_gradients = roots_among(outputs, gradients)
        if self._cuts is not None:
            for original, detached in self._cuts:
                if detached.grad is not None:
                    roots.append(original)
                    root_gradients.append(detached.grad)
            del original, detached
        if roots and self._stand_ins is not None:
            for stand_in, total in self._stand_ins.seeds(self._place.deferred):
                roots.append(stand_in)
                root_gradients.append(total)
        if lane is not None:
            lane.uses(root_gradients)
            if self._stand_ins is not None:
                lane.uses(self._stand_ins.totals())
        # Every reference of ours goes before autograd runs, so that it can free each buffer after its last use.
        inputs, stand_ins = self._inputs, self._stand_ins
        self.close()
        if roots:
            accumulate(roots, root_gradients)
        if stand_ins is not None:
            deferred = self._place.deferred  # their gradients are still to come
            stand_ins.collect(later=deferred)
            self._stand_ins = stand_ins if deferred else None
        return (_gradient_of(inputs[0]),) if len(inputs) == 1 else tuple(map(_gradient_of, inputs))

    def weight_gradients(self, lane: Lane | None) -> None:
        """Compute and deliver what backward deferred; ``lane`` is the one that this runs on, None on a CPU."""
        hooks, self.bwd_dw_callables = self.bwd_dw_callables, ()
        if self._outputs is not None or not hooks:
            raise NodeStateError("W of a slot before its B, or a second time; run it once, after its B")
        if lane is not None and self._stand_ins is not None:
            lane.uses(self._stand_ins.totals())
        for hook in hooks:
            hook.backward_dw()
        if self._stand_ins is not None:
            self._stand_ins.collect()
            self._stand_ins = None

    @property
    def outputs(self) -> Values:
        """What the node returned, with its graph; empty once backward has run."""
        return self._outputs or ()

    @property
    def owes_wgrads(self) -> bool:
        """Whether backward has run and what it deferred is still to be computed."""
        return self._outputs is None and bool(self.bwd_dw_callables)

    def close(self) -> None:
        """Forget everything; a second backward is an error."""
        self._inputs = ()
        self._outputs = None
        self._cuts = None
        self._stand_ins = None


def _gradient_of(value: Any) -> Tensor | None:
    return value.grad if isinstance(value, Tensor) else None
