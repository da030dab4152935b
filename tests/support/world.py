"""Process groups for the matrix: this process alone, or a few worker processes that run many cells in one group."""

from __future__ import annotations

import faulthandler
import gc
import importlib
import json
import pickle
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from layernodes.cpu import cpu_host
from tests.support.compare import ContextFactory, Verdict, agree, run_cell, worst
from tests.support.configs import Cell
from tests.support.workers import Worker, leave, workers

MEGATRON = "contextlib:nullcontext"
"""Megatron-Core's own plan, as a ``context``."""

LAYERNODES = "layernodes:install"
"""Megatron-Core's plan on layernodes' nodes, as a ``context``."""

_COLLECTIVE_TIMEOUT = timedelta(seconds=60)


def load_context(name: str) -> ContextFactory:
    """The context factory called ``module:attribute``."""
    module, _, attribute = name.partition(":")
    factory: ContextFactory = getattr(importlib.import_module(module), attribute)
    return factory


@contextmanager
def process_group(rank: int, world_size: int, store: Path) -> Iterator[None]:
    """A group over a file store, which needs no port; destroyed on leaving, Megatron's groups too.

    Gloo, with NCCL beside it for an accelerator's tensors.
    """
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(
        backend, init_method=f"file://{store}", rank=rank, world_size=world_size, timeout=_COLLECTIVE_TIMEOUT
    )
    try:
        yield
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


@contextmanager
def single_process_world() -> Iterator[None]:
    """A world of this one process, with Megatron's groups made."""
    with tempfile.TemporaryDirectory() as folder, process_group(0, 1, Path(folder) / "store"):
        parallel_state.initialize_model_parallel()
        yield


def use_layout(cell: Cell, *, seconds: float = 1800.0) -> None:
    """Make Megatron's groups for the cell's parallel sizes, unless they are there already.

    ``seconds`` is their timeout, if they are made.
    """
    if parallel_state.model_parallel_is_initialized():
        if _current_layout() == (cell.tp, cell.ep, cell.etp):
            return
        parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=cell.tp,
        expert_model_parallel_size=cell.ep,
        expert_tensor_parallel_size=cell.etp,
        create_gloo_process_groups=False,
        distributed_timeout_minutes=seconds / 60,
    )


def _current_layout() -> tuple[int, int, int]:
    return (
        parallel_state.get_tensor_model_parallel_world_size(),
        parallel_state.get_expert_model_parallel_world_size(),
        parallel_state.get_expert_tensor_parallel_world_size(),
    )


def run_cells(
    cells: Sequence[Cell],
    context: str,
    *,
    hooks: bool = False,
    cell_timeout: float = 120.0,
    report: Callable[[Verdict], None] = lambda verdict: None,
) -> dict[str, Verdict]:
    """Run ``cells`` in worker processes, one group for each world size, and return the verdict of each by name.

    A cell whose worker dies or makes no progress for ``cell_timeout`` seconds is a crash that says so; the remaining
    cells then go on in a new group. ``report`` is called with each verdict as it comes.
    """
    verdicts: dict[str, Verdict] = {}
    for world_size in sorted({cell.world_size for cell in cells}):
        # Cells of one layout side by side: making Megatron's groups costs more than a cell.
        pending = sorted(
            (cell for cell in cells if cell.world_size == world_size), key=lambda cell: (cell.tp, cell.ep, cell.etp)
        )
        while pending:
            group = _WorkerGroup(pending, context, world_size=world_size, hooks=hooks)
            for verdict in group.verdicts(cell_timeout):
                verdicts[verdict.name] = verdict
                report(verdict)
            pending = [cell for cell in pending if cell.name not in verdicts]
    return verdicts


class _WorkerGroup:
    """Worker processes that run cells in order, and the files through which they tell what came of them."""

    def __init__(self, cells: Sequence[Cell], context: str, *, world_size: int, hooks: bool) -> None:
        self._cells = cells
        self._context = context
        self._world_size = world_size
        self._hooks = hooks

    def verdicts(self, cell_timeout: float) -> Iterator[Verdict]:
        """Each cell's verdict, as soon as all ranks have it; the last one is a crash if the group did not finish."""
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            (folder / "work.pickle").write_bytes(pickle.dumps((self._cells, self._context, self._hooks)))
            with workers(f"{__name__}:work", self._world_size, folder) as started:
                yield from self._collect(started, folder, cell_timeout)

    def _collect(self, started: Sequence[Worker], folder: Path, cell_timeout: float) -> Iterator[Verdict]:
        deadline = time.monotonic() + cell_timeout
        for cell in self._cells:
            while not (lines := [_read(folder, rank, cell.name) for rank in range(self._world_size)]) or None in lines:
                failed = [rank for rank, worker in enumerate(started) if worker.wait(0.0) is not None]
                if failed and None in [_read(folder, rank, cell.name) for rank in failed]:
                    code = started[failed[0]].wait(0.0)
                    yield _crash(cell, f"worker {failed[0]} exited with {code}: {_tail(folder, failed[0])}")
                    return
                if time.monotonic() > deadline:
                    silent = [rank for rank, line in enumerate(lines) if line is None]
                    yield _crash(cell, f"no result from ranks {silent} within {cell_timeout:g} s (hang)")
                    return
                time.sleep(0.02)
            deadline = time.monotonic() + cell_timeout
            yield worst([line for line in lines if line is not None])


def _crash(cell: Cell, detail: str) -> Verdict:
    return Verdict(name=cell.name, status="crash", detail=detail)


def _tail(folder: Path, rank: int) -> str:
    lines = (folder / f"log{rank}").read_text(errors="replace").strip().splitlines()
    errors = [line for line in lines if "Error" in line or "what():" in line or "Fatal" in line]
    return (errors or lines or ["no output"])[-1][:300]


def _read(folder: Path, rank: int, name: str) -> Verdict | None:
    path = folder / f"{name}.{rank}.json"
    if not path.exists():
        return None
    fields: dict[str, Any] = json.loads(path.read_text())
    return Verdict(**{**fields, "differing": tuple(fields["differing"])})


def _write(folder: Path, rank: int, verdict: Verdict) -> None:
    """Write aside and rename, so that the reader never sees half a file."""
    aside = folder / f".{rank}.tmp"
    aside.write_text(json.dumps(asdict(verdict)))
    aside.rename(folder / f"{verdict.name}.{rank}.json")


def work(rank: int, world_size: int, folder: Path) -> None:
    """The worker's main: run every cell, agree on it with the other ranks, write it down."""
    cells, context, hooks = pickle.loads((folder / "work.pickle").read_bytes())
    factory = load_context(context)
    faulthandler.enable()  # a plan that frees too early can end in a segmentation fault
    gc.freeze()  # a collection after each crash would walk all of torch's and Megatron's classes
    with cpu_host(), process_group(rank, world_size, folder / "store"):
        for cell in cells:
            use_layout(cell)
            _write(folder, rank, agree(run_cell(cell, factory, hooks=hooks)))
        leave()
