"""Megatron-Core's local column and row parallel linears with their weight gradient deferred.

Their own ``backward_dw`` does nothing. ``deferring_parallel_linears`` puts a function of ours in the place of a
linear's ``_forward_impl`` for the forward of one node. Mirrors ``LinearWithGradAccumulationAndAsyncCommunication`` of
megatron-core 0.19: tensor parallel with asynchronous all-reduce of the input's gradient, sequence parallel, and fusion
into ``main_grad``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Final

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import layers as parallel_layers
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.module import MegatronModule
from megatron.core.utils import prepare_input_tensors_for_wgrad_compute
from torch import Tensor
from torch.nn import Linear, Module

from layernodes.stand_in import Site
from layernodes.wgrad import WgradStore, take_store

_LIBRARIES: Final = ("megatron", "torch", "transformer_engine")
PARALLEL_LINEARS: Final = (ColumnParallelLinear, RowParallelLinear)
_PRODUCTS: Final = tuple(kind._forward_impl for kind in PARALLEL_LINEARS)


def deferrable_sites(modules: Sequence[Module], excluded: frozenset[int] = frozenset()) -> tuple[Site, ...]:
    """The weights under ``modules`` whose gradients can be deferred, but those of modules whose id is excluded.

    Those of torch's and Megatron-Core's linears, and matrices that a module of the user's own class holds.
    """
    found: dict[tuple[int, str], Site] = {}
    pending = [module for module in modules if id(module) not in excluded]
    while pending:
        module = pending.pop()
        if isinstance(module, (Linear, *PARALLEL_LINEARS)):
            weight = module._parameters.get("weight")
            if weight is not None and weight.requires_grad and not getattr(module, "gtp_remat_size", 1) > 1:
                found[id(module), "weight"] = Site(module, "weight", weight)
        elif _is_users(type(module)):
            for name, weight in module._parameters.items():
                if weight is not None and weight.requires_grad and weight.dim() in (2, 3):
                    found[id(module), name] = Site(module, name, weight)
        pending.extend(child for child in module.children() if id(child) not in excluded)
    return tuple(found.values())


def _is_users(kind: type) -> bool:
    """Whether a module class inherits its parameters from no library whose use of them we do not see."""
    return all(
        base in (Module, MegatronModule) or base.__module__.partition(".")[0] not in _LIBRARIES for base in kind.__mro__
    )


@contextmanager
def deferring_parallel_linears(sites: Sequence[Site], store: WgradStore) -> Iterator[None]:
    """Run the forward of each parallel linear among ``sites`` with its weight gradient deferred to ``store``.

    A product of the user's own (``_forward_impl`` of a subclass, or put on the object) runs as it is.
    """
    changed: list[Module] = []
    try:
        for site in sites:
            if isinstance(site.module, PARALLEL_LINEARS):
                own = site.module._forward_impl
                if getattr(own, "__func__", None) in _PRODUCTS:
                    site.module.__dict__["_forward_impl"] = partial(_forward, own, store)
                    changed.append(site.module)
        yield
    finally:
        for module in changed:
            del module.__dict__["_forward_impl"]


def _forward(own: Callable[..., Tensor], store: WgradStore, input: Tensor, weight: Tensor, **arguments: Any) -> Tensor:
    """What a parallel linear calls for its product: ours for a deferred weight, its own for any other."""
    unsupported = (
        arguments.get("grad_output_buffer") is not None
        or arguments.get("gtp_remat_size", 1) > 1
        or hasattr(weight, "__fsdp_param__")
    )
    if unsupported or not store.can_defer(weight):
        return own(input=input, weight=weight, **arguments)
    output: Tensor = _DeferredParallelLinear.apply(
        input,
        weight.detach(),
        arguments["bias"],
        store.anchor,
        (weight,),
        store,
        arguments["gradient_accumulation_fusion"],
        arguments["allreduce_dgrad"],
        arguments["sequence_parallel"],
        arguments["tp_group"],
    )
    return output


class _DeferredParallelLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        anchor: Tensor,
        held: tuple[Tensor],
        store: WgradStore,
        gradient_accumulation_fusion: bool,
        allreduce_dgrad: bool,
        sequence_parallel: bool,
        tp_group: Any,
    ) -> Tensor:
        ctx.save_for_backward(input, weight)
        ctx.held, ctx.store = held, store
        ctx.has_bias = bias is not None
        ctx.gradient_accumulation_fusion = gradient_accumulation_fusion
        ctx.allreduce_dgrad = allreduce_dgrad
        ctx.sequence_parallel, ctx.tp_group = sequence_parallel, tp_group
        total = _gathered(input, tp_group) if sequence_parallel else input
        output = torch.matmul(total, weight.t())
        return output if bias is None else output + bias

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        store = take_store(ctx)
        input, weight = ctx.saved_tensors
        input_gradient = gradient.matmul(weight)
        handle = None
        if ctx.allreduce_dgrad:
            handle = dist.all_reduce(input_gradient, group=ctx.tp_group, async_op=True)
        elif ctx.sequence_parallel:
            shard = torch.empty_like(input)
            handle = parallel_layers.dist_reduce_scatter_func(shard, input_gradient, group=ctx.tp_group, async_op=True)
            input_gradient = shard
        bias_gradient = None
        if ctx.has_bias and ctx.needs_input_grad[2]:
            bias_gradient = gradient.contiguous().view(-1, gradient.shape[-1]).sum(dim=0)
        store.park(
            ctx.held[0],
            partial(
                _weight_gradient,
                input.detach(),  # without the gradient that an input of the node holds by now
                gradient,
                ctx.held[0],
                ctx.tp_group if ctx.sequence_parallel else None,
                ctx.gradient_accumulation_fusion,
            ),
        )
        ctx.held = None
        if handle is not None:
            handle.wait()
        return input_gradient, None, bias_gradient, None, None, None, None, None, None, None


def _weight_gradient(input: Tensor, gradient: Tensor, weight: Any, gather_group: Any, fuse: bool) -> Tensor | None:
    """The weight's gradient, or with fusion Megatron-Core's dummy after adding it to ``main_grad``."""
    total = input if gather_group is None else _gathered(input, gather_group)
    rows, total_rows = prepare_input_tensors_for_wgrad_compute(gradient, total)
    if not fuse:
        computed: Tensor = rows.t().matmul(total_rows)
        return computed
    main_grad = weight.main_grad
    if main_grad.dtype == torch.float32:
        parallel_layers.fused_weight_gradient_mlp_cuda.wgrad_gemm_accum_fp32(total_rows, rows, main_grad)
    else:
        parallel_layers.fused_weight_gradient_mlp_cuda.wgrad_gemm_accum_fp16(total_rows, rows, main_grad)
    if not hasattr(weight, "grad_added_to_main_grad"):
        return None
    weight.grad_added_to_main_grad = True
    make = torch.zeros if getattr(weight, "zero_out_wgrad", False) else torch.empty
    return make(main_grad.shape, dtype=input.dtype, device=input.device)


def _gathered(input: Tensor, group: Any) -> Tensor:
    total = input.new_empty((input.shape[0] * group.size(), *input.shape[1:]))
    parallel_layers.dist_all_gather_func(total, input, group=group)
    return total
