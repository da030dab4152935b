"""Checks that a node's graph ends at its inputs, the handoffs it took, and parameters.

A tensor that reaches a node by an undeclared way and requires grad would lose its gradient, or send it through another
node's graph, depending on who frees what first. So on a node's first forward that records a graph, and on the 2nd, 4th,
8th, ... (a way may depend on the data, and a walk at every forward would cost more than the rest of a slot's overhead;
``RecordingStreams`` check every one):

    walk from the outputs and from the tensors handed on, along the graph's edges
    what made an input (fused nodes share a graph)  -> the border, go no further
    a function that this forward did not make      -> reached through an undeclared tensor, unless it is a parameter's
                                                      cast, which autocast keeps for the next use. Each thread numbers
                                                      the functions that it makes; those of this forward lie between
                                                      the numbers at its begin and its end
    a leaf that is an input or handoff of another
    slot of this layer and microbatch              -> reached through an undeclared tensor
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, final

import torch
from torch import Tensor
from torch.autograd.graph import Node

from layernodes.errors import NodeStateError
from layernodes.state import NodeContext

if TYPE_CHECKING:
    from layernodes.nodes.base import ScheduleNode

_LEAVES: Final = "layernodes_leaves"
_RUNNING: Final = "layernodes_audits"
_RAISED: Final = torch.iinfo(torch.int).max  # what Megatron-Core numbers functions whose backward is to come first

Forward = Callable[..., Tensor | tuple[Tensor, ...]]
"""A node's forward, called with the context and the inputs."""

_Leaves = dict[int, tuple[weakref.ref[Tensor], str]]
"""Inputs and handoffs of a layer and microbatch by id, with what they are; weak, so that none lives for it."""


def note_taken(ctx: NodeContext, value: object) -> None:
    """Tell the audits that run on this layer and microbatch, several where a node wraps another, of a handoff taken."""
    if isinstance(value, Tensor):
        for audit in _running_on(ctx):
            audit.took(value)


def note_written(ctx: NodeContext, name: str, original: Tensor, detached: Tensor) -> None:
    """Tell the audits that run on this layer and microbatch of a differentiable handoff written."""
    for audit in _running_on(ctx):
        audit.wrote(name, original, detached)


def _is_cast_of_leaf(function: Node) -> bool:
    edges = function.next_functions
    return function.name() == "ToCopyBackward0" and len(edges) == 1 and hasattr(edges[0][0], "variable")


def _running_on(ctx: NodeContext) -> list[EdgeAudit]:
    running: list[EdgeAudit] = ctx.layer_state.__dict__.setdefault(_RUNNING, [])
    return running


@final
class EdgeAudit:
    """Audits one node's forwards that record a graph: the first, 2nd, 4th, 8th, and so on."""

    __slots__ = ("_allowed", "_borders", "_forwards", "_leaves", "_next", "_roots", "_slot")

    def __init__(self) -> None:
        self._forwards = 0
        self._next = 1
        self._reset({}, "")

    def is_due(self) -> bool:
        """Whether the forward that begins is to be audited; ask once for each."""
        if not torch.is_grad_enabled():
            return False
        self._forwards += 1
        return self._forwards >= self._next

    def run(
        self, node: ScheduleNode, forward: Forward, ctx: NodeContext, inputs: tuple[Tensor, ...]
    ) -> Tensor | tuple[Tensor, ...]:
        """Run ``forward``, the node's own or what gives it copies, and check its edges.

        Raises:
            NodeStateError: names what was reached and how to declare it.
        """
        leaves: _Leaves = ctx.layer_state.__dict__.setdefault(_LEAVES, {})
        slot = str(node.slot) if isinstance(node.slot, str) else node.slot.name
        self._reset(leaves, slot)
        for i, tensor in enumerate(inputs):
            if isinstance(tensor, Tensor) and tensor.requires_grad:
                self._allow(tensor)
                leaves[id(tensor)] = (weakref.ref(tensor), f"input {i} of {slot}")
        start = torch._C._autograd._get_sequence_nr()
        running = _running_on(ctx)
        running.append(self)
        try:
            outputs = forward(ctx, *inputs)
            flat = outputs if isinstance(outputs, tuple) else (outputs,)
            self._roots.extend((t, f"output {i}") for i, t in enumerate(flat) if isinstance(t, Tensor))
            found = self._find_foreign(start)
        finally:
            running.remove(self)
            self._reset({}, slot)
        if found is None:
            self._next = 2 * self._forwards
        if found:
            reached, root = found
            raise NodeStateError(
                f"{type(node).__name__}.forward used a tensor that requires grad and is neither an input nor a handoff "
                f"it took: {root} depends on {reached}; its gradient would be lost. Let the slot that makes the tensor "
                f"declare it in 'writes' and put it, and this one declare it in 'reads' and take it"
            )
        return outputs

    def wrote(self, name: str, original: Tensor, detached: Tensor) -> None:
        """Note a differentiable handoff written during the audited forward."""
        self._roots.append((original, f"handoff {name!r}"))
        self._leaves[id(detached)] = (weakref.ref(detached), f"handoff {name!r} written by {self._slot}")

    def took(self, tensor: Tensor) -> None:
        """Note a handoff taken during the audited forward."""
        self._allow(tensor)

    def _reset(self, leaves: _Leaves, slot: str) -> None:
        self._leaves = leaves
        self._slot = slot
        self._allowed: dict[int, Tensor] = {}
        self._borders: set[Node] = set()
        self._roots: list[tuple[Tensor, str]] = []

    def _allow(self, tensor: Tensor) -> None:
        self._allowed[id(tensor)] = tensor
        if tensor.grad_fn is not None:  # an input from a node that is fused with this one
            self._borders.add(tensor.grad_fn)

    def _find_foreign(self, start: int) -> tuple[str, str] | None:
        end = torch._C._autograd._get_sequence_nr()
        seen: set[Node] = set(self._borders)
        for tensor, root in self._roots:
            if tensor.grad_fn is None:
                if self._is_foreign_leaf(tensor):
                    return self._leaves[id(tensor)][1], root
                continue
            pending: list[Node] = [tensor.grad_fn]
            while pending:
                function = pending.pop()
                if function in seen:
                    continue
                seen.add(function)
                leaf = getattr(function, "variable", None)
                if leaf is not None:
                    if self._is_foreign_leaf(leaf):
                        return self._leaves[id(leaf)][1], root
                    continue
                number = function._sequence_nr()
                if (number < start or end <= number < _RAISED) and not _is_cast_of_leaf(function):
                    return f"{function.name()}, which this slot did not record", root
                pending.extend(edge for edge, _ in function.next_functions if edge is not None)
        return None

    def _is_foreign_leaf(self, tensor: Tensor) -> bool:
        leaf = self._leaves.get(id(tensor))
        return leaf is not None and leaf[0]() is tensor and id(tensor) not in self._allowed
