"""Runs one function on a few processes of one gloo group, on the CPU host, and collects what each returned."""

from __future__ import annotations

import faulthandler
import importlib
import os
import pickle
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any


def on_processes(world_size: int, function: str, *arguments: Any, timeout: float = 300.0) -> list[Any]:
    """Call ``module:function`` with the arguments on every rank; what each returned, in rank order.

    Raises:
        RuntimeError: a process failed, with the end of its output; all are killed then.
        TimeoutError: they were not done in time, with the end of each one's output.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "work.pickle").write_bytes(pickle.dumps((function, arguments, timeout)))
        workers = [_start(rank, world_size, folder) for rank in range(world_size)]
        try:
            deadline = time.monotonic() + timeout
            while any(worker.poll() is None for worker in workers):
                failed = [rank for rank, worker in enumerate(workers) if worker.poll() not in (None, 0)]
                if failed:
                    raise RuntimeError(f"rank {failed[0]} failed:\n{_tail(folder, failed[0])}")
                if time.monotonic() > deadline:
                    texts = [f"rank {rank}:\n{_tail(folder, rank, 25)}" for rank in range(world_size)]
                    raise TimeoutError(f"not done within {timeout:g} s\n" + "\n".join(texts))
                time.sleep(0.05)
            failed = [rank for rank, worker in enumerate(workers) if worker.returncode != 0]
            if failed:
                raise RuntimeError(f"rank {failed[0]} failed:\n{_tail(folder, failed[0])}")
            return [pickle.loads((folder / f"result{rank}").read_bytes()) for rank in range(world_size)]
        finally:
            for worker in workers:
                worker.kill()
                worker.wait()


def _start(rank: int, world_size: int, folder: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-W", "ignore", "-m", "tests.support.processes", str(rank), str(world_size), str(folder)]
    with (folder / f"log{rank}").open("wb") as log:
        return subprocess.Popen(
            command,
            cwd=Path(__file__).parents[2],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=log,
            stderr=subprocess.STDOUT,
        )


def _tail(folder: Path, rank: int, lines: int = 60) -> str:
    return "\n".join((folder / f"log{rank}").read_text(errors="replace").splitlines()[-lines:])


def _work(rank: int, world_size: int, folder: Path) -> None:
    from layernodes.cpu import cpu_host  # noqa: PLC0415 - the parent only starts processes
    from tests.support.world import process_group  # noqa: PLC0415

    faulthandler.enable()
    function, arguments, timeout = pickle.loads((folder / "work.pickle").read_bytes())
    # Where it hangs; not earlier, since walking the frames of threads that run can end in a segmentation fault.
    faulthandler.dump_traceback_later(0.95 * timeout)
    module, _, name = function.partition(":")
    call = getattr(importlib.import_module(module), name)
    with cpu_host(), process_group(rank, world_size, folder / "store"):
        result = call(*arguments)
    faulthandler.cancel_dump_traceback_later()
    (folder / f"result{rank}").write_bytes(pickle.dumps(result))


if __name__ == "__main__":
    _work(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
