"""Two ranks in a network namespace and on a core each, joined by a link whose rate can be limited.

Needs root, ``ip`` and ``tc`` (Linux). ``make_link`` says where they are missing.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel.utils import set_streams
from torch.distributed import ProcessGroup

from layernodes import cpu_host

NAMESPACES = tuple(f"layernodes-{os.getpid()}-{i}" for i in range(2))
ADDRESSES = ("10.99.0.1", "10.99.0.2")
_FIRST = 6
"""Priority of a connection whose packets ``pfifo_fast`` sends first."""
_BYTES_ACKED = 120
"""Offset of ``tcpi_bytes_acked`` in Linux's ``struct tcp_info``."""


def make_link() -> bool:
    """Make the namespaces and the link; False, and the reason on stderr, where that cannot be done."""
    reason = _try_link()
    if reason:
        print(f"network namespaces cannot be made here, so nothing was measured: {reason}", file=sys.stderr)
    return not reason


def _try_link() -> str:
    """The empty text, or why the link cannot be made here."""
    if os.geteuid() != 0:
        return "it needs root"
    if not (shutil.which("ip") and shutil.which("tc")):
        return "ip or tc is not installed"
    first, second = NAMESPACES
    commands = [f"ip netns add {name}" for name in NAMESPACES]
    commands += [f"ip link add lnveth0 netns {first} type veth peer name lnveth1 netns {second}"]
    for i, (name, address) in enumerate(zip(NAMESPACES, ADDRESSES, strict=True)):
        commands += [
            f"ip -n {name} addr add {address}/24 dev lnveth{i}",
            f"ip -n {name} link set lnveth{i} mtu 15000",
            f"ip -n {name} link set lnveth{i} up",
            f"ip -n {name} link set lo up",
        ]
    for command in commands:
        done = subprocess.run(command.split(), capture_output=True, text=True, check=False)
        if done.returncode:
            remove_link()
            return f"{command}: {done.stderr.strip()}"
    return ""


def limit_link(bits_per_second: float) -> None:
    """Limit both directions. The burst that passes unhindered after the link was idle is small beside an exchange,
    which so takes as long after computation as after another exchange."""
    for i, name in enumerate(NAMESPACES):
        rate = f"{int(bits_per_second / 1000)}kbit"
        change = f"ip netns exec {name} tc qdisc replace dev lnveth{i}"
        for command in (
            f"{change} root handle 1: tbf rate {rate} burst 16kb latency 1s",
            f"{change} parent 1:1 pfifo_fast",
        ):
            subprocess.run(command.split(), check=True)


def remove_link() -> None:
    """Remove the namespaces, and the link with them."""
    for name in NAMESPACES:
        subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def run_workers(module: str, arguments: Sequence[str]) -> Any:
    """Run a module on both ranks, with ``--worker`` and ``--folder`` besides; what rank 0 left through ``leave``."""
    with tempfile.TemporaryDirectory() as folder:
        workers = []
        for i, name in enumerate(NAMESPACES):
            core = i % (os.cpu_count() or 1)
            command = ["ip", "netns", "exec", name, "taskset", "-c", str(core)]
            command += [
                sys.executable,
                "-W",
                "ignore",
                "-m",
                module,
                "--worker",
                str(i),
                "--folder",
                folder,
                *arguments,
            ]
            environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": f"lnveth{i}"}
            workers.append(subprocess.Popen(command, env=environment))
        codes = [worker.wait(timeout=1200) for worker in workers]
        if any(codes):
            raise RuntimeError(f"the workers ended with exit codes {codes}")
        return json.loads((Path(folder) / "0.json").read_text())


@contextmanager
def two_ranks(rank: int, folder: Path) -> Iterator[None]:
    """In a worker: a gloo group of both, which share the experts, on the CPU host."""
    dist.init_process_group(
        "gloo", init_method=f"file://{folder / 'store'}", rank=rank, world_size=2, timeout=timedelta(minutes=5)
    )
    with cpu_host():
        parallel_state.initialize_model_parallel(expert_model_parallel_size=2)
        set_streams()
        let_small_messages_pass(parallel_state.get_expert_model_parallel_group())
        yield
    dist.barrier()
    dist.destroy_process_group()


def let_small_messages_pass(bulk: ProcessGroup) -> None:
    """In a worker: send the messages of all groups but ``bulk`` ahead of those that wait for the link.

    Clusters do so with traffic classes. Without, the router's few counts would wait behind the other microbatch's whole
    exchange, on the compute stream. Which connections are the group's is seen by sending something through it.
    """
    before = _bytes_acknowledged()
    payload = torch.zeros(2**20)
    dist.all_to_all_single(torch.empty_like(payload), payload, group=bulk)
    dist.barrier()
    for fd, acknowledged in _bytes_acknowledged().items():
        if acknowledged - before.get(fd, 0) < payload.nbytes // 4:
            with socket.socket(fileno=os.dup(fd)) as connection:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_PRIORITY, _FIRST)


def _bytes_acknowledged() -> dict[int, int]:
    """By file descriptor, what the peers of this process's TCP connections have acknowledged."""
    found = {}
    for entry in Path("/proc/self/fd").iterdir():
        try:
            if not os.readlink(entry).startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(entry.name))) as connection:
                info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
        except OSError:  # closed meanwhile, or no TCP
            continue
        found[int(entry.name)] = struct.unpack_from("<Q", info, _BYTES_ACKED)[0]
    return found


def leave(folder: Path, found: Any) -> None:
    """In the worker of rank 0: hand ``found`` to ``run_workers``."""
    (folder / "0.json").write_text(json.dumps(found))


def bytes_sent(rank: int) -> int:
    """Bytes that this rank's end of the link has sent so far."""
    return int(Path(f"/sys/class/net/lnveth{rank}/statistics/tx_bytes").read_text())
