"""What the benchmarks share: alternating repetitions, their medians and spread, tables, and starting several ranks."""

from __future__ import annotations

import ctypes
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

WARM_UP = 2


class Times(NamedTuple):
    """Seconds of one run: median, least and most over the repetitions; and the median of this process's own processor
    time, which leaves out waiting for other ranks and for a core."""

    median: float
    low: float
    high: float
    processor: float


def alternate(
    runs: Mapping[str, Callable[[], object]],
    repetitions: int,
    *,
    before: Callable[[str], object] = lambda name: None,
) -> dict[str, Times]:
    """Time every run in turn, again and again, so that whatever disturbs one disturbs them all.

    ``before`` is called with the name of each before it, untimed.
    """
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    processor: dict[str, list[float]] = {name: [] for name in runs}
    for repetition in range(repetitions + WARM_UP):
        for name, run in runs.items():
            before(name)
            start, processor_start = time.perf_counter(), time.process_time()
            run()
            if repetition >= WARM_UP:
                seconds[name].append(time.perf_counter() - start)
                processor[name].append(time.process_time() - processor_start)
    return {
        name: Times(statistics.median(found), min(found), max(found), statistics.median(processor[name]))
        for name, found in seconds.items()
    }


def keep_freed_memory() -> None:
    """Let malloc keep what is freed, as an accelerator's allocator does; does nothing where malloc is not glibc's.

    By default it hands the top of its heap back whenever enough of it is free, and the next step pays for the page
    faults: 3 % of a step and more, or nothing, as chance will have it.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_TRIM_THRESHOLD, 1 << 30)
        mallopt(_M_MMAP_THRESHOLD, 1 << 25)


_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3


def table(columns: Sequence[str], rows: Sequence[Sequence[str | float]]) -> str:
    """Columns of equal width; numbers with four significant digits."""
    cells = [[*columns], *([f"{cell:.4g}" if isinstance(cell, float) else str(cell) for cell in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in cells]
    return "\n".join(lines)


def show(found: Mapping[str, Any], text: str, *, as_json: bool) -> None:
    """Print a benchmark's result, as one document or for people."""
    print(json.dumps(found, indent=1) if as_json else text)


def on_ranks(num_ranks: int, module: str, arguments: Sequence[str]) -> int | None:
    """Start the module on several ranks and return how they ended; None on the ranks themselves."""
    if num_ranks == 1 or "RANK" in os.environ:
        return None
    command = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={num_ranks}", "--module", module, *arguments]
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    return subprocess.run(command, env=environment, check=False).returncode
