"""Layers with their nodes and microbatches, what the plain layers do with each, and runs that are compared with it.

A microbatch's plain outputs and gradients are kept apart, so that no schedule changes what is expected: parameters'
gradients must be the microbatches' own, added in one of the orders in which the microbatches can come.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from itertools import permutations
from typing import Any, final

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from layernodes._megatron.rng import Generators
from layernodes.errors import OptionError
from layernodes.nodes import ScheduleNode
from layernodes.plan import schedules
from layernodes.plan.chunk_plan import ChunkPlan
from layernodes.plan.chunk_run import state_without_model
from layernodes.plan.layer_plan import LayerPlan
from layernodes.plan.registry import NodeFactory, SlotKey
from layernodes.plan.rng import RngMode
from layernodes.plan.runner import Runner, RunResult
from layernodes.plan.schedule import Schedule
from layernodes.plan.slot_run import LayerState

Batch = Tensor | tuple[Tensor, Mapping[str, Any]]
"""A layer's input; or the input, and attributes of the chunk state."""

PlainLayer = Callable[[Any, Tensor], Tensor]
"""What a layer does, called with the layer and its input."""


@final
@dataclass(kw_only=True)
class Expected:
    """What each microbatch gives by itself.

    Attributes:
        outputs, input_grads: by microbatch.
        grads: by microbatch, gradient of each parameter.
    """

    outputs: list[Tensor] = field(default_factory=list)
    input_grads: list[Tensor | None] = field(default_factory=list)
    grads: list[list[Tensor | None]] = field(default_factory=list)


@final
class NodeBench:
    """Runs schedules over layers from the same state each time, and compares.

    Attributes:
        chunk: the layers' plans, as ``wgrad`` has them.
        names, parameters: every trainable parameter of the layers, once.
        draws: whether the plain layers draw random numbers.
    """

    def __init__(
        self,
        layers: Sequence[Module],
        nodes: Mapping[SlotKey, NodeFactory],
        batches: Sequence[Batch],
        plain: PlainLayer | None,
        wgrad: str,
    ) -> None:
        self.layers = list(layers)
        self.chunk = ChunkPlan.of([LayerPlan.build(layer, nodes=nodes, wgrad=wgrad) for layer in layers])
        named = {
            parameter: f"layer {i}'s {name}"
            for i, layer in enumerate(layers)
            for name, parameter in layer.named_parameters()
            if parameter.requires_grad
        }
        self.parameters: list[Parameter] = list(named)
        self.names = list(named.values())
        self._batches = [batch if isinstance(batch, tuple) else (batch, {}) for batch in batches]
        self._joined = ChunkPlan.of([LayerPlan.build(layer, nodes=nodes) for layer in layers]).layers
        self._plain = plain
        self._generators = Generators()
        self._states = self._generators.states()
        self._buffers = [(b, b.clone()) for layer in layers for b in layer.buffers()]
        self.loss_grads: list[Tensor] = []
        self.expected = self._expect()
        self.draws = any(not torch.equal(a, self._states[n]) for n, a in self._generators.states().items())
        self._per_step = self._expect_per_step() if self.draws else self.expected

    @property
    def num_microbatches(self) -> int:
        """How many there are."""
        return len(self._batches)

    def leaves(self) -> list[tuple[Tensor, Mapping[str, Any]]]:
        """The microbatches, fresh."""
        return [(x.detach().clone().requires_grad_(_has_gradients(x)), given) for x, given in self._batches]

    def restore(self) -> None:
        """Generators and buffers as they were, and no gradients."""
        self._generators.restore(self._states)
        with torch.no_grad():
            for buffer, kept in self._buffers:
                buffer.copy_(kept)
        for parameter in self.parameters:
            parameter.grad = None

    def run(self, schedule: Schedule, *, streams: Any = "inline", rng: str | None = None, **options: Any) -> RunResult:
        """Run a schedule from the fresh state."""
        self.restore()
        mode = rng or (RngMode.PER_STEP if self.draws else RngMode.PLAIN)
        with Runner(streams, rng=mode, **options) as runner:
            return runner.run(schedule, self.chunk, self.leaves(), self.loss_grads)

    def differing(self, result: RunResult, *, rng: str | None = None) -> list[str]:
        """Names of what a run left that is not bit for bit what is expected; in brackets, whether it is close."""
        expected = self.expected if rng == RngMode.PLAIN else self._per_step
        found = []
        for m in range(self.num_microbatches):
            found += _compare(f"output of microbatch {m}", result.outputs[m], [expected.outputs[m]])
        for i, parameter in enumerate(self.parameters):
            sums = list(_sums([grads[i] for grads in expected.grads]))
            found += _compare(f"gradient of {self.names[i]}", parameter.grad, sums)
        for m in range(self.num_microbatches):
            found += _compare(f"input gradient of microbatch {m}", result.input_grads[m], [expected.input_grads[m]])
        return found

    def joined(self, x: Tensor, given: Mapping[str, Any], visit: Visit | None = None) -> Tensor:
        """The nodes of all layers one after the other, in one graph."""
        value: tuple[Any, ...] = (x,)
        chunk_state = state_without_model(given)
        for number, plan in enumerate(self._joined):
            ctx = _JoinedContext(chunk_state, is_first=number == 0, is_last=number == len(self._joined) - 1)
            for node in plan.nodes.values():
                call = node if visit is None else lambda *args, node=node: visit(node, *args)
                returned = call(ctx, *value)
                value = returned if isinstance(returned, tuple) else (returned,)
        (output,) = value
        assert isinstance(output, Tensor)
        return output

    def remade(self, slot: SlotKey) -> list[str]:
        """Names of the parameters that a node at ``slot`` does not take from its layer: two nodes of one layer hold
        different ones."""
        names = []
        for one, other in zip(self.chunk.layers, self._joined, strict=True):
            held, again = (dict(_parameters(plan.nodes[slot])) for plan in (one, other))
            names += [name for name, parameter in held.items() if again.get(name) is not parameter]
        return list(dict.fromkeys(names))

    def plainly(self, x: Tensor, given: Mapping[str, Any]) -> Tensor:
        """What the layers do without nodes; where nobody says what that is, the nodes in one graph."""
        if self._plain is None:
            return self.joined(x, given)
        for layer in self.layers:
            x = self._plain(layer, x)
        return x

    def _expect(self) -> Expected:
        self.restore()
        expected = Expected()
        generator = torch.Generator().manual_seed(1)
        for leaf, given in self.leaves():
            output = self.plainly(leaf, given)
            if not isinstance(output, Tensor) or not output.requires_grad:
                raise OptionError(f"the plain layer returned {type(output).__name__}; it must be a tensor with a graph")
            self.loss_grads.append(torch.randn(output.shape, generator=generator).to(output))
            inputs = [*([leaf] if leaf.requires_grad else []), *self.parameters]
            found: list[Tensor | None] = list(
                torch.autograd.grad(output, inputs, self.loss_grads[-1], allow_unused=True)
            )
            expected.input_grads.append(found.pop(0) if leaf.requires_grad else None)
            expected.outputs.append(output.detach())
            expected.grads.append(found)
        return expected

    def _expect_per_step(self) -> Expected:
        """The same of the serial schedule in mode ``per_step``; other microbatches' gradients are kept at zero."""
        expected = Expected()
        serial = schedules.serial(self.chunk.shape, self.num_microbatches)
        loss_grads = self.loss_grads
        try:
            for m in range(self.num_microbatches):
                self.loss_grads = [g if i == m else torch.zeros_like(g) for i, g in enumerate(loss_grads)]
                result = self.run(serial, rng=RngMode.PER_STEP)
                expected.outputs.append(result.outputs[m])
                expected.input_grads.append(result.input_grads[m])
                expected.grads.append([p.grad for p in self.parameters])
        finally:
            self.loss_grads = loss_grads
        return expected


Visit = Callable[..., Any]
"""Called in place of a node, with it, its context and its inputs."""


@final
class _JoinedContext:
    """A context that cuts nothing, so that a layer's nodes make one graph."""

    is_mtp = False

    def __init__(self, chunk_state: object, *, is_first: bool, is_last: bool) -> None:
        self.layer_state: object = LayerState()
        self.chunk_state = chunk_state
        self.is_first_layer = is_first
        self.is_last_layer = is_last

    def detach(self, t: Tensor) -> Tensor:
        """Nothing is cut."""
        return t


def _parameters(node: ScheduleNode) -> Iterator[tuple[str, Parameter]]:
    for attribute, value in vars(node).items():
        if isinstance(value, Module):
            yield from ((f"{attribute}.{name}", parameter) for name, parameter in value.named_parameters())
        elif isinstance(value, Parameter):
            yield attribute, value


def _sums(gradients: Sequence[Tensor | None]) -> Iterator[Tensor | None]:
    """The gradients, added in every order."""
    there = [gradient for gradient in gradients if gradient is not None]
    if not there:
        yield None
    for order in permutations(there):
        if order:
            yield reduce(_add, order)


def _add(total: Tensor, gradient: Tensor) -> Tensor:
    if total.is_sparse and not gradient.is_sparse:  # torch adds nothing dense to what is sparse
        return gradient + total
    return total + gradient


def _has_gradients(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def is_equal(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are equal bit for bit; NaN equals NaN."""
    return (a.shape, a.dtype) == (b.shape, b.dtype) and _is_close(a, b, 0.0, 0.0)


def _is_close(a: Tensor, b: Tensor, rtol: float, atol: float) -> bool:
    return torch.allclose(_dense(a), _dense(b), rtol=rtol, atol=atol, equal_nan=True)


def _dense(tensor: Tensor) -> Tensor:
    return tensor if tensor.layout is torch.strided else tensor.to_dense()


def _compare(name: str, actual: Tensor | None, allowed: Sequence[Tensor | None]) -> list[str]:
    if actual is None or allowed[0] is None:
        if actual is None and allowed[0] is None:
            return []
        return [f"{name} (is missing)" if actual is None else f"{name} (there should be none)"]
    wanted = [
        tensor
        for tensor in allowed
        if tensor is not None and (tensor.shape, tensor.dtype) == (actual.shape, actual.dtype)
    ]
    if any(is_equal(actual, tensor) for tensor in wanted):
        return []
    is_close = any(_is_close(actual, tensor, 1e-4, 1e-6) for tensor in wanted)
    return [f"{name} (differs by rounding)" if is_close else f"{name} (is wrong)"]


def node_names(chunk: ChunkPlan) -> list[tuple[str, ScheduleNode]]:
    """Every node of a chunk, by a name for messages."""
    many = len(chunk.layers) > 1
    return [
        (f"{type(node).__name__} of layer {i}" if many else type(node).__name__, node)
        for i, plan in enumerate(chunk.layers)
        for node in plan.nodes.values()
    ]
