"""Programs as ``python`` and ``torchrun`` start them, or without the seconds that importing torch takes them."""

from __future__ import annotations

import json
import os
import runpy
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.support.full import FULL
from tests.support.workers import workers

_ROOT = Path(__file__).parents[2]


def launched(*command: str, world_size: int = 1, really: bool = FULL) -> subprocess.CompletedProcess[str]:
    """What came of ``FILE ARGUMENTS``, ``-m MODULE ARGUMENTS`` or ``-c CODE``, ``world_size`` of them.

    ``really``: a new interpreter, under ``torchrun`` where there are several ranks. Otherwise workers which have torch
    imported, and in their environment what ``torchrun`` would put there.
    """
    if not really:
        return _in_workers(command, world_size)
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world_size))
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    return subprocess.run(
        [sys.executable, *(launcher if world_size > 1 else ()), *command],
        cwd=_ROOT,
        env={**environment, "PYTHONPATH": str(_ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def _in_workers(command: tuple[str, ...], world_size: int) -> subprocess.CompletedProcess[str]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with socket.socket() as free:
            free.bind(("localhost", 0))
            port = free.getsockname()[1]
        (folder / "work").write_text(json.dumps([command, port]))
        with workers(f"{__name__}:work", world_size, folder) as started:
            deadline = time.monotonic() + 240
            codes = [worker.wait(max(0.1, deadline - time.monotonic())) for worker in started]
        out, err = (
            "".join((folder / f"{word}{rank}").read_text() for rank in range(world_size)) for word in ("out", "log")
        )
        assert None not in codes, f"still running after 240 s: {out}{err}"
        return subprocess.CompletedProcess(command, next((code for code in codes if code), 0), out, err)


def work(rank: int, world_size: int, folder: Path) -> None:
    """The worker's main: the program, with its own standard output."""
    command, port = json.loads((folder / "work").read_text())
    with (folder / f"out{rank}").open("wb") as out:
        os.dup2(out.fileno(), 1)
    given: dict[str, object] = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": world_size,
        "LOCAL_WORLD_SIZE": world_size,
    }
    given |= {"MASTER_ADDR": "localhost", "MASTER_PORT": port, "TORCHELASTIC_RUN_ID": port}
    for name, value in given.items():
        os.environ.pop(name, None)
        if world_size > 1:
            os.environ[name] = str(value)
    if command[0] == "-c":
        exec(compile(command[1], "<string>", "exec"), {"__name__": "__main__"})
    elif command[0] == "-m":
        _, module, *sys.argv[1:] = command
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    else:
        sys.argv[:] = command
        sys.path.insert(0, str(Path(command[0]).parent))
        runpy.run_path(command[0], run_name="__main__")
