"""Linear operations of torch whose weight gradient is deferred.

``deferring_linears`` intercepts, in a node's forward, ``F.linear(x, w)`` and ``x @ w`` (``torch.matmul``,
``torch.mm``) of
a deferred weight ``w``, and runs the same operation in a function of our own. Its backward multiplies what autograd's
own
would, in the same order, so that the bits are the same; the weight's product waits in the store.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from layernodes.wgrad import WgradStore

_MATMULS: frozenset[Any] = frozenset({torch.matmul, torch.mm, Tensor.matmul, Tensor.mm, Tensor.__matmul__})


@final
class deferring_linears(TorchFunctionMode):
    """Defers, while active, the weight gradients of linear operations to ``store``."""

    def __init__(self, store: WgradStore) -> None:
        super().__init__()
        self._store = store

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.linear:
            x, weight, bias = _linear_operands(*args, **kwargs)
            if self._can_defer(x, weight):
                return self._defer(x, weight, bias, is_matmul=False)
        elif func in _MATMULS and len(args) == 2 and not kwargs and self._can_defer(*args):
            return self._defer(*args, None, is_matmul=True)
        return func(*args, **kwargs)

    def _defer(self, x: Tensor, weight: Tensor, bias: Tensor | None, *, is_matmul: bool) -> Any:
        # The weight goes in detached, and itself only as a thing to hold: no edge of the graph leads to it.
        return _DeferredLinear.apply(x, weight.detach(), bias, self._store.anchor, (weight,), is_matmul, self._store)

    def _can_defer(self, x: Any, weight: Any) -> bool:
        return (
            isinstance(x, Tensor)
            and isinstance(weight, Tensor)
            and self._store.defers(weight)
            and weight.dim() == 2
            and x.dim() >= 2
            # Elsewhere autograd takes another way through the product, and autocast would put a cast between.
            and x.is_contiguous()
            and torch.is_grad_enabled()
            and not torch.is_autocast_enabled(x.device.type)
        )


def _linear_operands(x: Any, weight: Any, bias: Any = None) -> tuple[Any, Any, Any]:
    return x, weight, bias


class _DeferredLinear(torch.autograd.Function):
    """``F.linear(x, weight, bias)``, or ``x @ weight`` where ``is_matmul``; parks the weight's gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        anchor: Tensor,
        held: tuple[Tensor],
        is_matmul: bool,
        store: WgradStore,
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.held, ctx.store, ctx.is_matmul = held, store, is_matmul
        ctx.has_bias = bias is not None
        return torch.matmul(x, weight) if is_matmul else F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        store, is_matmul = ctx.store, ctx.is_matmul
        x_rows = x.reshape(-1, x.shape[-1])
        rows = gradient.reshape(-1, gradient.shape[-1])
        x_gradient = None
        if ctx.needs_input_grad[0]:
            x_gradient = rows.mm(weight.t() if is_matmul else weight).view(x.shape)
        bias_gradient = rows.sum(0) if ctx.has_bias and ctx.needs_input_grad[2] else None

        def weight_gradient() -> Tensor:
            return x_rows.t().mm(rows) if is_matmul else rows.t().mm(x_rows)

        store.park(ctx.held[0], weight_gradient)
        ctx.store = ctx.held = None
        return x_gradient, None, bias_gradient, None, None, None, None
