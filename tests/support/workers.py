"""Worker processes of one test, one for each rank: started together, killed together.

Importing torch and Megatron-Core takes longer than most of what workers do. So each rank has a server that has them
imported, and forks its workers off; the hashes and the addresses of two ranks differ as those of any two processes.
"""

from __future__ import annotations

import atexit
import functools
import gc
import importlib
import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist

_IMPORTED = ("tests.support.ranks", "tests.support.training", "tests.support.rank_cases")


class Worker:
    """A process that a server forked off."""

    def __init__(self, server: subprocess.Popen[bytes]) -> None:
        assert server.stdout is not None
        self._server, self._printed = server, server.stdout
        self._pid = int(self._line())
        self._exit_code: int | None = None

    def wait(self, seconds: float) -> int | None:
        """The exit code, minus the signal where one ended it; None where it still runs after ``seconds``."""
        if self._exit_code is None and select.select([self._printed], [], [], seconds)[0]:
            self._exit_code = int(self._line())
        return self._exit_code

    def kill(self) -> None:
        """End it, unless it has ended."""
        while self.wait(0.0) is None:
            with suppress(ProcessLookupError):  # it has just ended: its code is on the way, and must be read
                os.kill(self._pid, signal.SIGKILL)
            self.wait(1.0)

    def _line(self) -> bytes:
        line: bytes = self._printed.readline()
        assert line, f"the server of workers ended with {self._server.wait()}; what it said is on standard error"
        return line


@contextmanager
def workers(target: str, world_size: int, folder: Path) -> Iterator[list[Worker]]:
    """Processes that call ``module:function`` with their rank, the world size and ``folder``, where each writes
    ``log<rank>``."""
    servers = [_server(rank) for rank in range(world_size)]
    for rank, server in enumerate(servers):
        assert server.stdin is not None
        server.stdin.write(json.dumps([target, rank, world_size, str(folder), dict(os.environ)]).encode() + b"\n")
    started: list[Worker] = []
    try:
        started += [Worker(server) for server in servers]
        yield started
    finally:
        for worker in started:
            worker.kill()


@functools.cache
def _server(rank: int) -> subprocess.Popen[bytes]:
    """The server of one rank, until this process ends."""
    server = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-m", __name__, *([] if torch.cuda.is_available() else _IMPORTED)],
        bufsize=0,
        cwd=Path(__file__).parents[2],
        env={**os.environ, "OMP_NUM_THREADS": "1"},  # no thread may run where a process forks
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )

    def end() -> None:
        server.communicate()

    atexit.register(end)
    return server


def _serve() -> None:
    """Fork a worker for each line of standard input; print its process and, when it has ended, its exit code."""
    for module in sys.argv[1:]:
        importlib.import_module(module)
    gc.collect()
    gc.freeze()  # a collection in a worker would walk, and so copy, all that is imported
    while line := sys.stdin.readline():
        process = os.fork()
        if not process:
            _become_worker(*json.loads(line))
        print(process, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]), flush=True)


def _become_worker(target: str, rank: int, world_size: int, folder: str, environment: dict[str, str]) -> NoReturn:
    with Path(folder, f"log{rank}").open("wb") as log, Path(os.devnull).open("rb") as nothing:
        os.dup2(nothing.fileno(), 0)
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    os.environ |= {**environment, "OMP_NUM_THREADS": "1"}
    module, _, name = target.partition(":")
    getattr(importlib.import_module(module), name)(rank, world_size, Path(folder))
    sys.exit()


def leave() -> NoReturn:
    """End this worker when the others have come as far: its groups would take a second to come down."""
    with suppress(RuntimeError):  # the others are gone
        dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    _serve()
