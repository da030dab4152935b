"""A stand-in for ``TELinear``, which Megatron-Core's latent MoE takes from Transformer Engine alone."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, ClassVar

import torch
from torch import Tensor

from layernodes.errors import UnsupportedLayerError
from layernodes.quiet import quiet_import

with quiet_import():
    from megatron.core.tensor_parallel import random as megatron_random


class HostLinear(torch.nn.Module):
    """``TELinear(parallel_mode="duplicated")`` in plain torch, for the projections of latent MoE.

    Returns ``(output, bias or None)`` and marks its parameters as Transformer Engine's linear does. Its weight
    gradient comes with the backward pass, as with Megatron's local linears: ``backward_dw`` has nothing left to do.
    """

    weight: Tensor
    supported_parallel_mode: ClassVar[str] = "duplicated"

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        parallel_mode: str | None,
        config: Any,
        init_method: Callable[[Tensor], object],
        bias: bool,
        skip_bias_add: bool,
        **_: object,
    ) -> None:
        super().__init__()
        if parallel_mode != self.supported_parallel_mode:
            raise UnsupportedLayerError(
                f"a linear with parallel_mode={parallel_mode!r}: the CPU host has Transformer Engine's linear "
                f"with {self.supported_parallel_mode!r} only; use ColumnParallelLinear or RowParallelLinear",
                field="parallel_mode",
                value=parallel_mode,
            )
        self.skip_bias_add = skip_bias_add
        self.weight = torch.nn.Parameter(torch.empty(output_size, input_size, dtype=config.params_dtype))
        self.bias = torch.nn.Parameter(torch.zeros(output_size, dtype=config.params_dtype)) if bias else None
        if config.perform_initialization:
            self._initialize(init_method, on_cpu=config.use_cpu_initialization)
        for parameter in self.parameters():
            vars(parameter).update(
                allreduce=True, sequence_parallel=config.sequence_parallel, tensor_model_parallel=False
            )

    @torch.no_grad()
    def _initialize(self, init_method: Callable[[Tensor], object], *, on_cpu: bool) -> None:
        """Draw the weight alike on all tensor-parallel ranks: from the data-parallel state where there is one."""
        tracker = megatron_random.get_cuda_rng_tracker()
        name = megatron_random.get_data_parallel_rng_tracker_name()
        shared = tracker.fork(name) if name in tracker.get_states() and not on_cpu else nullcontext()
        with shared:
            init_method(self.weight)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """``[..., input_size]`` to ``[..., output_size]``, and the bias where the caller adds it."""
        if self.skip_bias_add:
            return torch.nn.functional.linear(x, self.weight), self.bias
        return torch.nn.functional.linear(x, self.weight, self.bias), None

    def backward_dw(self) -> None:
        """Nothing is deferred."""
