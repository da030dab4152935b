"""A linear that holds its weight gradient back, as Transformer Engine's do under ``delay_wgrad_compute``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, owner: Any) -> Tensor:
        """x wT."""
        ctx.save_for_backward(x, weight)
        ctx.owner = owner
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        """The input's gradient; the weight's waits on the module."""
        x, weight = ctx.saved_tensors
        rows, total = gradient.flatten(0, -2), x.flatten(0, -2)
        ctx.owner.queue.append(lambda: rows.t() @ total)
        return gradient @ weight, None, None


class HoldingLinear(Module):
    """``(output, None)`` like Megatron-Core's linears; ``backward_dw`` computes and accumulates, first in first out."""

    def __init__(self, weight: Parameter) -> None:
        super().__init__()
        self.weight = weight
        self.queue: list[Callable[[], Tensor]] = []
        self.drained = 0
        self._hooks: list[Callable[[], object]] = []

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        """The weight is an edge of the graph, and gets no gradient there."""
        return _Product.apply(x, self.weight, self), None

    def backward_dw(self) -> None:
        """Compute one microbatch's weight gradient."""
        gradient = self.queue.pop(0)()
        self.weight.grad = gradient if self.weight.grad is None else self.weight.grad + gradient
        self.drained += 1
        for hook in self._hooks:
            hook()

    def register_wgrad_accumulation_and_reduce_hooks(self, hook: Callable[[], object]) -> None:
        """What Megatron-Core's DDP calls for parameters marked ``skip_backward_post_hook``."""
        self._hooks.append(hook)


HoldingLinear.__module__ = "megatron.core.extensions.transformer_engine"


def hold_back(owner: Any, name: str) -> HoldingLinear:
    """Put a ``HoldingLinear`` over the same weight in the place of a linear."""
    module = HoldingLinear(getattr(owner, name).weight)
    setattr(owner, name, module)
    return module
