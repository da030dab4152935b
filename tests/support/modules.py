"""What Megatron's local specs lack on a CPU: norms under sequence parallel, MLA and THD attention, grouped experts."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.experts import GroupedMLPSubmodules, TEGroupedMLP
from torch import Tensor


def sequence_parallel_norm(config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> torch.nn.Module:
    """Megatron's torch norm, whose parameters say that they are shared by a sequence-parallel group.

    Megatron's own wrapper refuses sequence parallel because nothing marks the parameters for the reduction that its
    training loop does afterwards; forward and backward need nothing.
    """
    norm_class = torch.nn.RMSNorm if config.normalization == "RMSNorm" else torch.nn.LayerNorm
    norm = norm_class(hidden_size, eps=eps)
    for parameter in norm.parameters():
        parameter.sequence_parallel = config.sequence_parallel
    return norm


class OwnAttention(MegatronModule):
    """Causal attention in plain torch, any head sizes, over ``[s, b, heads, size]`` or packed ``[t, heads, size]``."""

    def __init__(
        self,
        config: Any,
        layer_number: int,
        *,
        attn_mask_type: Any,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        k_channels: int | None = None,
        v_channels: int | None = None,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> None:
        super().__init__(config=config)
        self.scale = 1.0 / math.sqrt(k_channels or config.kv_channels) if softmax_scale is None else softmax_scale
        self.dropout = torch.nn.Dropout(config.attention_dropout if attention_dropout is None else attention_dropout)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> Tensor:
        """``[s, b, heads * size]``; packed, ``[t, heads, size]``."""
        if packed_seq_params is None:
            return self._attend(query, key, value).flatten(2)
        bounds = packed_seq_params.cu_seqlens_q.tolist()
        parts = [
            self._attend(query[a:b, None], key[a:b, None], value[a:b, None])[:, 0]
            for a, b in itertools.pairwise(bounds)
        ]
        return torch.cat(parts)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        groups = query.size(2) // key.size(2)
        if groups > 1:
            key, value = key.repeat_interleave(groups, dim=2), value.repeat_interleave(groups, dim=2)
        scores = torch.einsum("sbnh,tbnh->bnst", query, key).float() * self.scale
        future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        weights = scores.masked_fill(future, float("-inf")).softmax(-1).to(value.dtype)
        if self.config.sequence_parallel:
            weights = self.dropout(weights)
        else:
            with tensor_parallel.get_cuda_rng_tracker().fork():
                weights = self.dropout(weights)
        return torch.einsum("bnst,tbnh->sbnh", weights, value)


class GroupedSpecProvider(LocalSpecProvider):
    """Megatron's local modules, but its real grouped experts, over ``PlainGroupedLinear``."""

    def grouped_mlp_modules(self, moe_use_grouped_gemm: bool) -> Any:
        """The builder of the experts."""
        linears = GroupedMLPSubmodules(linear_fc1=PlainGroupedLinear, linear_fc2=PlainGroupedLinear)
        return functools.partial(TEGroupedMLP, submodules=linears)


class PlainGroupedLinear(torch.nn.Module):
    """Transformer Engine's ``GroupedLinear`` as one plain linear an expert; its weight gradient comes with backward."""

    def __init__(
        self,
        num_gemms: int,
        input_size: int,
        output_size: int,
        *,
        config: Any,
        init_method: Callable[[Tensor], object],
        bias: bool,
        skip_bias_add: bool,
        **_: Any,
    ) -> None:
        super().__init__()
        self.num_gemms, self.use_bias, self.skip_bias_add = num_gemms, bias, skip_bias_add
        for index in range(num_gemms):
            weight = torch.nn.Parameter(torch.empty(output_size, input_size, dtype=config.params_dtype))
            init_method(weight)
            self.register_parameter(f"weight{index}", weight)
            if bias:
                self.register_parameter(f"bias{index}", torch.nn.Parameter(torch.zeros(output_size)))
        for parameter in self.parameters():
            parameter.allreduce = config.expert_model_parallel_size == 1

    def forward(self, x: Tensor, tokens_per_expert: list[int]) -> tuple[Tensor, list[Tensor] | None]:
        """Rows sorted by expert, in and out; the biases too where the caller adds them."""
        weights = [getattr(self, f"weight{index}") for index in range(self.num_gemms)]
        biases = [getattr(self, f"bias{index}") if self.use_bias else None for index in range(self.num_gemms)]
        added = [None] * self.num_gemms if self.skip_bias_add else biases
        parts = [
            torch.nn.functional.linear(rows, weight, bias)
            for rows, weight, bias in zip(x.split(tokens_per_expert), weights, added, strict=True)
        ]
        return torch.cat(parts), biases if self.skip_bias_add and self.use_bias else None

    def backward_dw(self) -> None:
        """Nothing is deferred."""
