"""Small layers of the user's own, and what is counted while their schedules run."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.utils._python_dispatch import TorchDispatchMode

from layernodes import ChunkPlan, LayerPlan, Runner, Schedule, Slot, StreamType
from layernodes.nodes import ScheduleNode
from layernodes.state import NodeContext
from layernodes.wgrad import WgradStore

Forward = Callable[[Any, Tensor], Tensor]

PRODUCTS = frozenset({"mm", "addmm", "bmm", "baddbmm"})
"""Names of the aten operations that a product ends in."""


class ModuleNode(ScheduleNode):
    """Runs a module, or ``forward(module, x)``, in the mlp slot."""

    slot = Slot.MLP
    stream = StreamType.COMPUTE

    def __init__(self, module: Module, forward: Forward | None = None) -> None:
        self.module = module
        self._forward = forward

    def forward(self, ctx: NodeContext, *inputs: Tensor) -> Tensor:
        """The module's own forward, or the given one."""
        (x,) = inputs
        output: Tensor = self.module(x) if self._forward is None else self._forward(self.module, x)
        return output


class FirstNode(ModuleNode):
    """The same in the first slot."""

    slot = Slot.PRE_DISPATCH_COMPUTATION


class CommNode(ModuleNode):
    """The same in the dispatch slot, on the communication stream."""

    slot = Slot.MOE_DISPATCH
    stream = StreamType.COMM


class StoreNode(ModuleNode):
    """Runs ``forward(module, x, store)`` with the node's store."""

    def __init__(self, module: Module, run: Callable[[Any, Tensor, WgradStore | None], Tensor]) -> None:
        super().__init__(module)
        self._run_with_store = run

    def forward(self, ctx: NodeContext, *inputs: Tensor) -> Tensor:
        """The given forward."""
        (x,) = inputs
        return self._run_with_store(self.module, x, self.wgrad_store(ctx))


def plan_of(*modules: Module, forward: Forward | None = None, wgrad: str = "auto") -> ChunkPlan:
    """One layer a module, in the mlp slot."""
    return chunk_of(*((module, {Slot.MLP: lambda it: ModuleNode(it, forward)}) for module in modules), wgrad=wgrad)


def chunk_of(*layers: tuple[Module, dict[Any, Any]], wgrad: str = "auto") -> ChunkPlan:
    """Layers given as (module, nodes)."""
    return ChunkPlan.of([LayerPlan.build(module, nodes=nodes, wgrad=wgrad) for module, nodes in layers])


class Grid(Module):
    """A module that holds matrices of its own: ``w``, and others by name."""

    def __init__(self, w: Any, **others: Any) -> None:
        super().__init__()
        for name, value in {"w": w, **others}.items():
            self.register_parameter(name, value if isinstance(value, torch.nn.Parameter) else leaf(value))


def leaf(values: Any) -> torch.nn.Parameter:
    """A parameter in float64 of the given numbers, or of a tensor."""
    given = values if isinstance(values, Tensor) else torch.tensor(values, dtype=torch.float64)
    return torch.nn.Parameter(given)


class OpLog(TorchDispatchMode):
    """Notes (step, operation, shapes of its tensors) while a schedule runs inline."""

    def __init__(self) -> None:
        super().__init__()
        self.step = ""
        self.calls: list[tuple[str, str, tuple[tuple[int, ...], ...]]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func.overloadpacket.__name__
        if name in PRODUCTS:
            self.calls.append((self.step, name, tuple(tuple(a.shape) for a in args if isinstance(a, Tensor))))
        return func(*args, **(kwargs or {}))

    def products(self, phase: str) -> list[tuple[tuple[int, ...], ...]]:
        """Shapes of the operands of each product in steps of a phase, sorted."""
        return sorted(shapes for step, _, shapes in self.calls if step.startswith(phase))


def run(
    schedule: Schedule | str,
    chunk: ChunkPlan,
    batches: Sequence[Any],
    *,
    loss_grads: Sequence[Any] | None = None,
    streams: str = "inline",
    before_step: Callable[[Any], None] | None = None,
    after_step: Callable[[Any], None] | None = None,
) -> Any:
    """Run a schedule, given as text too."""
    if isinstance(schedule, str):
        schedule = Schedule.parse(schedule)
    with Runner(streams=streams, before_step=before_step, after_step=after_step) as runner:
        return runner.run(schedule, chunk, batches, loss_grads)


def logged(schedule: Schedule | str, chunk: ChunkPlan, batches: Sequence[Any], **arguments: Any) -> OpLog:
    """Run a schedule inline and return what was multiplied in which step."""
    log = OpLog()

    def note(step: Any) -> None:
        log.step = str(step)

    with log:
        run(schedule, chunk, batches, before_step=note, **arguments)
    return log


def gradients(module: Module) -> dict[str, Tensor | None]:
    """Copies of the gradients by name."""
    return {name: None if p.grad is None else p.grad.clone() for name, p in module.named_parameters()}


def plain(
    forward: Callable[[Tensor], Tensor], batches: Sequence[Tensor], loss_grads: Sequence[Tensor] | None = None
) -> list[Tensor | None]:
    """Plain autograd over the batches in order; gradients accumulate, those of the inputs are returned."""
    found: list[Tensor | None] = []
    for i, batch in enumerate(batches):
        x = batch.detach().requires_grad_(batch.requires_grad)
        y = forward(x)
        y.backward(torch.ones_like(y) if loss_grads is None else loss_grads[i])
        found.append(x.grad)
    return found


def held_bytes() -> int:
    """Bytes of the storages that tensors in Python, or closures and graphs behind them, keep alive."""
    gc.collect()
    found: dict[int, int] = {}
    for value in gc.get_objects():
        if type(value) in (Tensor, torch.nn.Parameter) and value.device.type == "cpu" and value.numel() >= 8:
            storage = value.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
            if value.is_leaf and value.grad is not None:
                found[value.grad.untyped_storage().data_ptr()] = value.grad.untyped_storage().nbytes()
    return sum(found.values())


@contextmanager
def fused_accumulation() -> Iterator[list[tuple[int, ...]]]:
    """A stand-in for apex's ``fused_weight_gradient_mlp_cuda``; yields the shapes it was called for."""
    from types import SimpleNamespace  # noqa: PLC0415

    from megatron.core.tensor_parallel import layers  # noqa: PLC0415

    calls: list[tuple[int, ...]] = []

    def accumulate(total_input: Tensor, grad_output: Tensor, main_grad: Tensor) -> None:
        calls.append(tuple(main_grad.shape))
        main_grad.add_((grad_output.t() @ total_input).to(main_grad.dtype))

    missing = object()
    before = getattr(layers, "fused_weight_gradient_mlp_cuda", missing), layers._grad_accum_fusion_available
    layers.fused_weight_gradient_mlp_cuda = SimpleNamespace(
        wgrad_gemm_accum_fp32=accumulate, wgrad_gemm_accum_fp16=accumulate
    )
    layers._grad_accum_fusion_available = True
    try:
        yield calls
    finally:
        layers._grad_accum_fusion_available = before[1]
        if before[0] is missing:
            del layers.fused_weight_gradient_mlp_cuda
        else:
            layers.fused_weight_gradient_mlp_cuda = before[0]
