"""What each rank does in ``tests/test_train_bytes.py``: runs of the example, one after the other in one process."""

from __future__ import annotations

import io
import json
import os
import sys
from collections.abc import Sequence
from contextlib import nullcontext, redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from megatron.core.transformer.moe.moe_logging import destroy_moe_metrics_tracker
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.multi_token_prediction import MTPLossAutoScaler, MTPLossLoggingHelper
from torch import Tensor


def forget_losses() -> None:
    """Forget what Megatron-Core keeps for the whole process: scales and sums of its losses, generators."""
    MoEAuxLossAutoScaler.main_loss_backward_scale = None
    MTPLossAutoScaler.main_loss_backward_scale = torch.tensor(1.0)
    destroy_moe_metrics_tracker()
    MTPLossLoggingHelper.tracker.clear()
    get_cuda_rng_tracker().reset()


def resumed(
    folder: str, half: int, options: Sequence[str], early: Sequence[str], ways: Sequence[Sequence[str]]
) -> list[str]:
    """Train plainly for twice ``half`` steps; half under ``early``, the rest each way from its checkpoint; what
    differs."""
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    sys.path.insert(0, str(Path(__file__).parents[2] / "docs" / "examples"))
    import train_bytes  # noqa: PLC0415 - it lies outside the package

    own, count = dist.init_process_group, 0

    def join(backend: str, **_: Any) -> None:
        nonlocal count
        count += 1
        own(backend, init_method=f"file://{folder}/store{count}", rank=rank, world_size=size)

    def losses(*arguments: str) -> list[float]:
        forget_losses()
        printed = io.StringIO()
        with redirect_stdout(printed):
            train_bytes.main([*options, *arguments])
        return list(json.loads(printed.getvalue())["losses"]) if rank == 0 else []

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "init_process_group", join)
        patch.setattr(train_bytes.layernodes, "cpu_host", nullcontext)  # this process has entered one
        patch.setitem(os.environ, "RANK", str(rank))
        whole = ["--steps", f"{2 * half}"]
        plain = losses(*whole, "--save", f"{folder}/plain")
        first = losses("--steps", f"{half}", *early, "--save", f"{folder}/half")
        found = [] if first == plain[:half] else ["first losses"]
        for number, way in enumerate(ways):
            name = f"{folder}/{number}"
            if losses(*whole, *way, "--load", f"{folder}/half", "--save", name) != plain[half:]:
                found.append(f"losses of {way}")
            found += [f"{way}: {key}" for key in _differing(f"{folder}/plain", name, rank)]
        join("gloo")
    return found


def _differing(one: str, other: str, rank: int) -> list[str]:
    """The tensors of two checkpoints of this rank that are not the same."""
    states = [torch.load(f"{folder}/rank{rank}.pt", weights_only=False) for folder in (one, other)]
    flat = [dict(_tensors(state, "")) for state in states]
    assert len(flat[0]) > 20
    if flat[0].keys() != flat[1].keys():
        return sorted(flat[0].keys() ^ flat[1].keys())[:4]
    return [key for key in flat[0] if not torch.equal(flat[0][key], flat[1][key])][:4]


def _tensors(value: Any, name: str) -> Any:
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _tensors(item, f"{name}.{key}")
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from _tensors(item, f"{name}.{index}")
