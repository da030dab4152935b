"""The two fused backends of Megatron's ``flex`` dispatcher over plain ``all_to_all_single``, with autograd.

``fused_dispatch`` / ``fused_combine`` are DeepEP's: a rank receives each token once that any of its experts wants.
``hybrid_ep_dispatch`` / ``hybrid_ep_combine`` are HybridEP's: a rank receives a token once an expert, expert by expert.
The real ``MoEFlexTokenDispatcher`` runs on top of either.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from megatron.core.transformer.moe import token_dispatcher
from torch import Tensor


class Route(NamedTuple):
    """Which local rows go out, how many to and from each rank, and where the arrivals lie."""

    rows: Tensor
    send: list[int]
    receive: list[int]
    num_tokens: int
    group: Any
    order: Tensor | None = None

    def out(self, tokens: Tensor) -> Tensor:
        """Send this rank's ``[num_tokens, ...]``; returns what arrives."""
        arrived = _exchange(tokens[self.rows], self.send, self.receive, self.group)
        return arrived if self.order is None else arrived[self.order]

    def back(self, arrived: Tensor) -> Tensor:
        """Send arrivals home and sum what belongs to the same token."""
        if self.order is not None:
            arrived = torch.empty_like(arrived).index_copy_(0, self.order, arrived)
        home = _exchange(arrived, self.receive, self.send, self.group)
        return home.new_zeros(self.num_tokens, *home.shape[1:]).index_add_(0, self.rows, home)


def _exchange(rows: Tensor, send: list[int], receive: list[int], group: Any) -> Tensor:
    arrived = rows.new_empty(sum(receive), *rows.shape[1:])
    dist.all_to_all_single(arrived, rows.contiguous(), receive, send, group=group)
    return arrived


def _exchange_counts(counts: Tensor, group: Any) -> Tensor:
    """``[ranks, ...]`` counts for each rank to ``[ranks, ...]`` counts from each rank."""
    arrived = torch.empty_like(counts)
    dist.all_to_all_single(arrived, counts.contiguous(), group=group)
    return arrived


class _FusedDispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, indices: Tensor, probs: Tensor, num_experts: int, group: Any) -> Any:
        num_local = num_experts // group.size()
        owner = torch.where(indices >= 0, indices // num_local, -1)
        wanted = [(owner == rank).any(1).nonzero().flatten() for rank in range(group.size())]
        counts = torch.tensor([len(rows) for rows in wanted])
        route = Route(torch.cat(wanted), counts.tolist(), _exchange_counts(counts, group).tolist(), len(x), group)
        target = torch.arange(group.size()).repeat_interleave(counts)[:, None]
        mine = owner[route.rows] == target
        local = torch.where(mine, indices[route.rows] - target * num_local, -1)
        kept = probs[route.rows].masked_fill(~mine, 0)
        arrived = route.out(x)
        arrived_indices = _exchange(local, route.send, route.receive, group)
        arrived_probs = _exchange(kept, route.send, route.receive, group)
        per_expert = torch.bincount(arrived_indices[arrived_indices >= 0], minlength=num_local)
        ctx.route, ctx.mine = route, mine
        ctx.mark_non_differentiable(arrived_indices, per_expert)
        return arrived, arrived_indices, arrived_probs, per_expert, route

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _indices: Any, grad_probs: Tensor, _counts: Any, _route: Any) -> Any:
        return ctx.route.back(grad), None, ctx.route.back(grad_probs), None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, route: Route) -> Tensor:
        ctx.route = route
        return route.back(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return ctx.route.out(grad), None


class _HybridDispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, routing_map: Tensor, probs: Tensor, group: Any, num_local: int) -> Any:
        experts, rows = routing_map.bool().T.nonzero(as_tuple=True)
        counts = torch.bincount(experts, minlength=routing_map.size(1)).view(group.size(), num_local)
        arriving = _exchange_counts(counts, group)
        # Rows arrive sorted by (rank, expert); the experts want them by (expert, rank).
        expert_of = torch.arange(num_local).repeat(group.size()).repeat_interleave(arriving.flatten())
        order = expert_of.argsort(stable=True)
        route = Route(rows, counts.sum(1).tolist(), arriving.sum(1).tolist(), len(x), group, order)
        arrived_probs = _exchange(probs[rows, experts], route.send, route.receive, group)[order]
        per_expert = arriving.sum(0)
        ctx.route, ctx.experts, ctx.probs_shape = route, experts, probs.shape
        ctx.mark_non_differentiable(per_expert)
        return route.out(x), arrived_probs, None, per_expert, route

    @staticmethod
    def backward(ctx: Any, grad: Tensor, grad_probs: Tensor, *_: Any) -> Any:
        route = ctx.route
        home = torch.empty_like(grad_probs).index_copy_(0, route.order, grad_probs)
        home = _exchange(home, route.receive, route.send, route.group)
        scattered = home.new_zeros(ctx.probs_shape)
        scattered[route.rows, ctx.experts] = home
        return route.back(grad), None, scattered, None, None


def fused_dispatch(
    x: Tensor, token_indices: Tensor, token_probs: Tensor, num_experts: int, group: Any, **_: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor, Route]:
    """DeepEP's dispatch: tokens, local expert indices (-1: not here), their probabilities, counts, handle."""
    return _FusedDispatch.apply(x, token_indices, token_probs, num_experts, group)


def fused_combine(x: Tensor, group: Any, handle: Route, **_: Any) -> tuple[Tensor, None]:
    """DeepEP's combine: the sum over ranks for each token."""
    return _Combine.apply(x, handle), None


def hybrid_ep_dispatch(
    *, x: Tensor, routing_map: Tensor, probs: Tensor, group: Any, num_local_experts: int, **_: Any
) -> tuple[Tensor, Tensor, None, Tensor, Route]:
    """HybridEP's dispatch without budget or padding: permuted tokens, their probabilities, counts, handle."""
    return _HybridDispatch.apply(x, routing_map, probs, group, num_local_experts)


def hybrid_ep_combine(*, x: Tensor, handle: Route, **_: Any) -> Tensor:
    """HybridEP's combine: the sum over experts for each token."""
    return _Combine.apply(x, handle)


@contextmanager
def emulated_backends() -> Iterator[None]:
    """Put both backends where Megatron's dispatcher looks for them."""
    stand_ins = {
        "fused_dispatch": fused_dispatch,
        "fused_combine": fused_combine,
        "set_deepep_num_sms": lambda num_sms: None,
        "hybrid_ep_dispatch": hybrid_ep_dispatch,
        "hybrid_ep_combine": hybrid_ep_combine,
    }
    with ExitStack() as stack:
        for name, stand_in in stand_ins.items():
            stack.enter_context(mock.patch.object(token_dispatcher, name, stand_in))
        yield
