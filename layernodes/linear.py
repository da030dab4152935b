"""Products of torch whose weight gradient is deferred.

``deferring_products`` intercepts, in a node's forward, the products of a deferred weight: ``F.linear(x, w)``,
``x @ w``, ``x @ w.t()`` and the others of ``_PRODUCTS``. Results and gradients are those of plain autograd bit for bit,
by one of two ways:

    usual      real 2-d weight, contiguous 2-d or 3-d input of a linear or matmul: a function of ours whose backward
               multiplies what autograd's own would, in the same order
    any other  the product is recorded in a graph of its own over detached operands; backward asks it for the
               operands' gradients, and W for the weight's

Where the store cannot defer, nothing is intercepted: the weight's stand-in gets its gradient in backward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, final

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.overrides import TorchFunctionMode

from layernodes.wgrad import WgradStore, take_store

_MATMULS: frozenset[Any] = frozenset({torch.matmul, torch.mm, Tensor.matmul, Tensor.mm, Tensor.__matmul__})
_PRODUCTS: frozenset[Any] = frozenset(
    {
        *_MATMULS,
        F.linear,
        torch.addmm,
        torch.baddbmm,
        torch.bmm,
        torch.einsum,
        Tensor.__rmatmul__,
        Tensor.addmm,
        Tensor.baddbmm,
        Tensor.bmm,
        *(function for function in (getattr(F, "grouped_mm", None), getattr(torch, "_grouped_mm", None)) if function),
    }
)
_TRANSPOSES: frozenset[Any] = frozenset(
    {
        *(torch.t, torch.transpose, Tensor.t, Tensor.transpose),
        Tensor.T.__get__,  # type: ignore[attr-defined]  # a descriptor on the class, where torch's stubs say Tensor
        Tensor.mT.__get__,  # type: ignore[attr-defined]  # as T
    }
)
_BACKWARDS: frozenset[Any] = frozenset({torch.autograd.grad, Tensor.backward})


class _Operand(NamedTuple):
    """A deferred weight as it goes into a product: itself, or transposed."""

    weight: Tensor
    value: Tensor
    is_transposed: bool


@final
class deferring_products(TorchFunctionMode):
    """Defers, while active, the weight gradients of products to ``store``."""

    def __init__(self, store: WgradStore) -> None:
        super().__init__()
        self._store = store
        self._transposed: dict[int, _Operand] = {}

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _BACKWARDS:
            # torch hands these on with the inputs in one place each.
            inputs = args[1] if func is torch.autograd.grad else kwargs["inputs"]
            for operand in self._weights_among((inputs,), {}):
                self._store.check_wanted(operand.weight)
        elif func in _PRODUCTS:
            found = self._weights_among(args, kwargs)
            if len(found) == 1 and self._store.can_defer(found[0].weight):
                return self._defer(func, args, kwargs, found[0])
        elif func in _TRANSPOSES and args and self._store.defers(args[0]) and args[0].dim() == 2:
            value = func(*args, **kwargs)
            if value.stride() == args[0].stride()[::-1] and value.shape == args[0].shape[::-1]:
                self._transposed[id(value)] = _Operand(args[0], value, True)
            return value
        return func(*args, **kwargs)

    def _weights_among(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[_Operand]:
        found = []
        for value in (*args, *kwargs.values()):
            if isinstance(value, Tensor):
                if self._store.defers(value):
                    found.append(_Operand(value, value, False))
                elif id(value) in self._transposed:
                    found.append(self._transposed[id(value)])
            elif isinstance(value, list | tuple):
                found += self._weights_among(tuple(value), {})
        return found

    def _defer(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], operand: _Operand) -> Any:
        usual = _usual(func, args, kwargs, operand)
        if usual is not None:
            # The weight goes in as a thing to hold: no edge of the graph leads to it.
            x, bias, is_matmul = usual
            return _DeferredLinear.apply(
                x, operand.weight.detach(), bias, self._store.anchor, operand, is_matmul, self._store
            )
        product = _Product(func, args, kwargs, operand)
        others = [tensor for tensor in product.tensors if tensor.requires_grad]
        return _DeferredProduct.apply(self._store, product, self._store.anchor, *others)


def _usual(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], operand: _Operand
) -> tuple[Tensor, Tensor | None, bool] | None:
    """Input, bias, and whether the weight is ``[in, out]``, of a product in the usual form; None for another one."""
    bias = None
    if func is F.linear and not operand.is_transposed:
        x, weight, bias = _linear_operands(*args, **kwargs)
        is_matmul = False
    elif func in _MATMULS and len(args) == 2 and not kwargs:
        x, weight = args
        is_matmul = not operand.is_transposed
    else:
        return None
    fits = (
        weight is operand.value
        and isinstance(x, Tensor)
        and type(x) in (Tensor, torch.nn.Parameter)
        and x.dim() in (2, 3)
        and x.is_contiguous()
        and operand.weight.dim() == 2
        and not operand.weight.is_complex()
        and operand.weight.is_contiguous()
    )
    return (x, bias, is_matmul) if fits else None


def _linear_operands(input: Any, weight: Any, bias: Any = None) -> tuple[Any, Any, Any]:
    return input, weight, bias


class _DeferredLinear(torch.autograd.Function):
    """``F.linear(x, weight, bias)``, or ``x @ weight`` where ``is_matmul``; parks the weight's gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        anchor: Tensor,
        operand: _Operand,
        is_matmul: bool,
        store: WgradStore,
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.weight, ctx.store, ctx.is_matmul = operand.weight, store, is_matmul
        ctx.has_bias = bias is not None
        # Given the weight that requires grad, torch chooses the same kernel as for the plain layer.
        if is_matmul or operand.is_transposed:
            return torch.matmul(x, operand.value)
        return F.linear(x, operand.value, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        store, is_matmul = take_store(ctx), ctx.is_matmul
        x, weight = ctx.saved_tensors
        # Detached: what waits must not be the node's input itself, which by now holds its own gradient.
        x_rows = x.detach().reshape(-1, x.shape[-1])
        rows = gradient.reshape(-1, gradient.shape[-1])
        x_gradient = None
        if ctx.needs_input_grad[0]:
            x_gradient = rows.mm(weight.t() if is_matmul else weight).view(x.shape)
        bias_gradient = rows.sum(0) if ctx.has_bias and ctx.needs_input_grad[2] else None

        def weight_gradient() -> Tensor:
            return x_rows.t().mm(rows) if is_matmul else rows.t().mm(x_rows)

        store.park(ctx.weight, weight_gradient)
        ctx.weight = None
        return x_gradient, None, bias_gradient, None, None, None, None


@final
class _Product:
    """Any product, to be recorded over detached operands."""

    def __init__(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], operand: _Operand
    ) -> None:
        self._func, self._args, self._kwargs, self.operand = func, args, kwargs, operand
        self.tensors: list[Tensor] = []

        def note(tensor: Tensor) -> Tensor:
            self.tensors.append(tensor)
            return tensor

        self._map(note)

    def record(self) -> tuple[Tensor, Tensor, list[Tensor]]:
        """Result, weight leaf, and the leaves of the other operands that require grad."""
        leaves: list[Tensor] = []
        weight = self.operand.weight.detach().requires_grad_()

        def leaf(tensor: Tensor) -> Tensor:
            detached = tensor.detach()
            if tensor.requires_grad:
                leaves.append(detached.requires_grad_())
            return detached

        args, kwargs = self._map(leaf, weight.t() if self.operand.is_transposed else weight)
        return self._func(*args, **kwargs), weight, leaves

    def _map(self, change: Callable[[Tensor], Tensor], weight: Tensor | None = None) -> tuple[Any, dict[str, Any]]:
        def each(value: Any) -> Any:
            if value is self.operand.value:
                return weight
            if isinstance(value, Tensor):
                return change(value)
            return type(value)(map(each, value)) if type(value) in (list, tuple) else value

        return each(self._args), {name: each(value) for name, value in self._kwargs.items()}


class _DeferredProduct(torch.autograd.Function):
    """Any product; parks the weight's gradient."""

    @staticmethod
    def forward(ctx: Any, store: WgradStore, product: _Product, anchor: Tensor, *others: Tensor) -> Tensor:
        with torch.enable_grad():
            output, weight, leaves = product.record()
        ctx.store, ctx.weight, ctx.leaf, ctx.leaves = store, product.operand.weight, weight, leaves
        ctx.edge = get_gradient_edge(output)
        return output.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        store = take_store(ctx)
        edge, leaf, leaves = ctx.edge, ctx.leaf, ctx.leaves
        wanted = [one for one, needed in zip(leaves, ctx.needs_input_grad[3:], strict=True) if needed]
        found = iter(_gradients(edge, wanted, gradient, retain_graph=True) if wanted else ())
        store.park(ctx.weight, lambda: _gradients(edge, [leaf], gradient, retain_graph=False)[0])
        del ctx.weight, ctx.edge, ctx.leaf, ctx.leaves
        return None, None, None, *(next(found) if needed else None for needed in ctx.needs_input_grad[3:])


def _gradients(edge: Any, leaves: Sequence[Tensor], gradient: Tensor, *, retain_graph: bool) -> Sequence[Tensor]:
    return torch.autograd.grad(edge, leaves, gradient, retain_graph=retain_graph)
