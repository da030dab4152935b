"""Where the demonstration runs: a GPU or the CPU host, one process or those that ``torchrun`` started."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Final

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel.utils import set_streams
from megatron.core.transformer.moe.moe_logging import destroy_moe_metrics_tracker
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

from layernodes.cpu import cpu_host
from layernodes.quiet import quiet

_TIMEOUT: Final = timedelta(minutes=5)


@dataclass(frozen=True, kw_only=True)
class World:
    """This process among its peers, and its device."""

    rank: int
    num_ranks: int
    device: torch.device

    @property
    def backend(self) -> str:
        """Name of what moves tensors between the ranks."""
        return str(dist.get_backend())

    def gather[T](self, value: T) -> Sequence[T]:
        """Every rank's ``value``, in rank order; all ranks call it."""
        values: list[T | None] = [None] * self.num_ranks
        dist.all_gather_object(values, value)
        return [one for one in values if one is not None]

    def wait_for_all(self) -> None:
        """Return when all ranks have called it."""
        dist.barrier()


def num_launched_ranks() -> int:
    """Number of processes that the launcher says there are; 1 without one."""
    return int(os.environ.get("WORLD_SIZE", "1"))


@contextmanager
def demo_world() -> Iterator[World]:
    """Set up device, process group and Megatron-Core's groups, all ranks sharing the experts; undo it on leaving.

    Megatron-Core's warnings and log records below errors are not shown meanwhile.
    """
    with ExitStack() as stack:
        stack.enter_context(quiet("megatron"))
        host = stack.enter_context(cpu_host())
        device = torch.device("cpu" if host.active else f"cuda:{os.environ.get('LOCAL_RANK', '0')}")
        if device.type == "cuda":
            torch.cuda.set_device(device)
            stack.enter_context(_deterministic())
        _join_group(stack, "gloo" if device.type == "cpu" else "nccl")
        parallel_state.initialize_model_parallel(expert_model_parallel_size=dist.get_world_size())
        stack.callback(parallel_state.destroy_model_parallel)
        set_streams()
        _forget_metrics()
        stack.callback(_forget_metrics)
        yield World(rank=dist.get_rank(), num_ranks=dist.get_world_size(), device=device)


def _join_group(stack: ExitStack, backend: str) -> None:
    """The launcher's group; a group of this process alone, which needs no port, where there is no launcher."""
    if "RANK" in os.environ:
        dist.init_process_group(backend, timeout=_TIMEOUT)
    else:
        store = dist.HashStore()  # type: ignore[attr-defined]  # documented, but missing from its __all__
        dist.init_process_group(backend, store=store, rank=0, world_size=1, timeout=_TIMEOUT)
    stack.callback(dist.destroy_process_group)


def _forget_metrics() -> None:
    """Megatron-Core keeps the auxiliary losses of all layers in one place, as many as the first model had layers."""
    destroy_moe_metrics_tracker()
    MTPLossLoggingHelper.tracker.clear()


@contextmanager
def _deterministic() -> Iterator[None]:
    """On a GPU some backward kernels add in no fixed order; then no two runs, plain ones included, are equal."""
    before, warn_only = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warn_only)
