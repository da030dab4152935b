"""Worker processes of one test, one for each rank: started together, killed together."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def workers(module: str, world_size: int, folder: Path) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Processes that run ``module`` with their rank, the world size and ``folder``, where each writes ``log<rank>``."""
    started: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(world_size):
            with (folder / f"log{rank}").open("wb") as log:
                started.append(
                    subprocess.Popen(
                        [sys.executable, "-W", "ignore", "-m", module, str(rank), str(world_size), str(folder)],
                        cwd=Path(__file__).parents[2],
                        env={**os.environ, "OMP_NUM_THREADS": "1"},
                        stdout=log,
                        stderr=subprocess.STDOUT,
                    )
                )
        yield started
    finally:
        for worker in started:
            worker.kill()
            worker.wait()
