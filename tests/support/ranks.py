"""Run a function in several processes of one gloo group and collect what each returned, raised or died of."""

from __future__ import annotations

import faulthandler
import importlib
import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from layernodes.cpu import cpu_host
from tests.support.deepep import emulated_backends
from tests.support.workers import leave, workers


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of one rank: the value returned, or the error's text, or neither for a process that died."""

    value: Any = None
    error: str = ""
    exit_code: int | None = None
    log: str = ""


def run_on_ranks(
    target: str, *arguments: Any, world_size: int = 2, seconds: float = 120.0, group_seconds: float = 60.0
) -> list[Outcome]:
    """Call ``module:function`` with ``arguments`` on every rank; a rank still running after ``seconds`` is killed."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "work").write_bytes(pickle.dumps((target, arguments, seconds, group_seconds)))
        with workers(f"{__name__}:work", world_size, folder) as started:
            deadline = time.monotonic() + seconds
            codes = [worker.wait(max(0.1, deadline - time.monotonic())) for worker in started]
            return [_outcome(rank, code, folder) for rank, code in enumerate(codes)]


def values_on_ranks(target: str, *arguments: Any, **options: Any) -> list[Any]:
    """What each rank returned; every rank's error or log fails the test. Options as for ``run_on_ranks``."""
    outcomes = run_on_ranks(target, *arguments, **options)
    told = [f"rank {rank}: {o.error}\n{o.log}" for rank, o in enumerate(outcomes) if o.error]
    assert not told, "\n".join(told)
    return [outcome.value for outcome in outcomes]


def _outcome(rank: int, exit_code: int | None, folder: Path) -> Outcome:
    log = (folder / f"log{rank}").read_text(errors="replace")[-3000:]
    path = folder / f"result{rank}"
    if not path.exists():
        return Outcome(exit_code=exit_code, log=log, error="no result")
    value, error = pickle.loads(path.read_bytes())
    return Outcome(value=value, error=error, exit_code=exit_code, log=log)


def work(rank: int, world_size: int, folder: Path) -> None:
    """The worker's main: call the function, and write down what it returned or raised."""
    faulthandler.enable()
    target, arguments, seconds, group_seconds = pickle.loads((folder / "work").read_bytes())
    # Where it hangs; not earlier, since walking the frames of threads that run can end in a segmentation fault.
    faulthandler.dump_traceback_later(0.95 * seconds)
    module, _, name = target.partition(":")
    function: Callable[..., Any] = getattr(importlib.import_module(module), name)
    with cpu_host(), emulated_backends():
        dist.init_process_group(
            "gloo",
            init_method=f"file://{folder / 'store'}",
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=group_seconds),
        )
        value, error = None, ""
        try:
            value = function(*arguments)
        except BaseException:
            error = traceback.format_exc()
        aside = folder / f".{rank}"
        aside.write_bytes(pickle.dumps((value, error)))
        aside.rename(folder / f"result{rank}")
        faulthandler.cancel_dump_traceback_later()
        if error:
            os._exit(1)  # a broken group may not come down
        leave()
