"""What of this machine layernodes can use, and why not the rest; for ``layernodes doctor``."""

from __future__ import annotations

import importlib.util
import platform
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Final

import torch
import torch.distributed as dist
from pydantic import BaseModel, ConfigDict

from layernodes.lane import accelerator_with_streams

PACKAGES: Final = (
    "layernodes",
    "torch",
    "megatron-core",
    "pydantic",
    "numpy",
    "transformer-engine",
    "deep-ep",
    "grouped-gemm",
    "matplotlib",
    "hypothesis",
)
_SUPPORTED: Final = ((0, 19, 2), (0, 20))
_TE: Final = "transformer-engine is not installed; Megatron-Core's local layers do without"


class Feature(BaseModel):
    """One thing that may be usable here.

    Attributes:
        name: what it is.
        usable: whether it can be used here.
        reason: why not, or what it is used for.
    """

    model_config = ConfigDict(frozen=True)

    name: str
    usable: bool
    reason: str


class Diagnosis(BaseModel):
    """What ``layernodes doctor`` says.

    Attributes:
        python, system: the interpreter's version, and the system.
        packages: version of each package; None for one that is not installed.
        devices: the accelerators, by name.
        streams, backends, features: kinds of streams, of process groups, and features of Megatron-Core.
        problems: what keeps layernodes from running at all; empty where it runs.
    """

    model_config = ConfigDict(frozen=True)

    python: str
    system: str
    packages: dict[str, str | None]
    devices: tuple[str, ...]
    streams: tuple[Feature, ...]
    backends: tuple[Feature, ...]
    features: tuple[Feature, ...]
    problems: tuple[str, ...]

    def __str__(self) -> str:
        lines = [f"python {self.python} on {self.system}"]
        lines += [f"{name} {found or '(not installed)'}" for name, found in self.packages.items()]
        lines += ["", f"devices: {', '.join(self.devices) or 'none; layernodes.cpu_host() runs Megatron-Core without'}"]
        for title in ("streams", "backends", "features"):
            features: tuple[Feature, ...] = getattr(self, title)
            width = max(len(feature.name) for feature in features)
            lines += ["", title]
            lines += [f"  {'yes' if f.usable else 'no ':3}  {f.name:{width}}  {f.reason}".rstrip() for f in features]
        return "\n".join([*lines, "", *(self.problems or ["nothing keeps layernodes from running here"])])


def diagnose() -> Diagnosis:
    """Look at this machine; imports torch, and looks for the rest without importing it."""
    packages = {name: _version(name) for name in PACKAGES}
    devices = _devices()
    return Diagnosis(
        python=platform.python_version(),
        system=platform.platform(terse=True),
        packages=packages,
        devices=devices,
        streams=_streams(devices),
        backends=_backends(devices),
        features=_features(packages, devices),
        problems=tuple(find_problems(packages, sys.version_info[:2])),
    )


def find_problems(packages: dict[str, str | None], python: Sequence[int]) -> list[str]:
    """What keeps layernodes from running, with what to do."""
    found = []
    if tuple(python) < (3, 12):
        found.append(f"Python {'.'.join(map(str, python))} is too old; use 3.12 or newer")
    for name in ("torch", "megatron-core", "pydantic", "numpy"):
        if packages[name] is None:
            found.append(f"{name} is not installed: pip install layernodes")
    megatron = packages["megatron-core"]
    if megatron is not None and not _SUPPORTED[0] <= _numbers(megatron) < _SUPPORTED[1]:
        found.append(
            f"megatron-core {megatron} is not supported, and its private names may have moved; "
            f"pip install 'megatron-core>=0.19.2,<0.20'"
        )
    return found


def _streams(devices: Sequence[str]) -> tuple[Feature, ...]:
    no_device = "torch finds no accelerator with streams"
    return (
        Feature(name="inline", usable=True, reason="one step after the other; nothing overlaps"),
        Feature(name="threads", usable=True, reason="two threads: gloo's exchanges run beside computation"),
        Feature(name="cuda", usable=bool(devices), reason="two streams of the accelerator" if devices else no_device),
        Feature(name="recording", usable=True, reason="proves that steps are ordered, without a device"),
    )


def _backends(devices: Sequence[str]) -> tuple[Feature, ...]:
    if not dist.is_available():
        return (Feature(name="torch.distributed", usable=False, reason="this torch was built without it"),)
    built = {"gloo": dist.is_gloo_available(), "nccl": dist.is_nccl_available(), "mpi": dist.is_mpi_available()}
    used = {"gloo": "processes on CPUs", "nccl": "processes on GPUs", "mpi": "not tested with layernodes"}
    needs_device = {"nccl"}
    return tuple(
        Feature(
            name=name,
            usable=is_built and (bool(devices) or name not in needs_device),
            reason="this torch was built without it"
            if not is_built
            else "there is no GPU"
            if name in needs_device and not devices
            else used[name],
        )
        for name, is_built in built.items()
    )


def _features(packages: dict[str, str | None], devices: Sequence[str]) -> tuple[Feature, ...]:
    has_te = packages["transformer-engine"] is not None
    has_deepep = importlib.util.find_spec("deep_ep") is not None
    no_gpu = "there is no GPU"
    has_plot, has_testing = packages["matplotlib"] is not None, packages["hypothesis"] is not None
    rows = (
        ("local layers", packages["megatron-core"] is not None, "on GPUs, and on a CPU inside layernodes.cpu_host()"),
        ("Transformer Engine layers", has_te and bool(devices), _TE if not has_te else "" if devices else no_gpu),
        ("dispatcher alltoall, allgather", True, "any backend"),
        (
            "dispatcher flex (deepep, hybridep)",
            has_deepep and bool(devices),
            "deep_ep is not installed" if not has_deepep else "" if devices else no_gpu,
        ),
        ("deferred weight gradients", True, "any linear, with or without Transformer Engine"),
        ("CUDA graphs", bool(devices), "used where Megatron-Core captures them" if devices else no_gpu),
        ("fp8", has_te and bool(devices), "needs Transformer Engine and a GPU"),
        ("pictures (layernodes[plot])", has_plot, "" if has_plot else "pip install 'layernodes[plot]'"),
        ("check_node (layernodes[testing])", has_testing, "" if has_testing else "pip install 'layernodes[testing]'"),
    )
    return tuple(Feature(name=name, usable=usable, reason=reason) for name, usable, reason in rows)


def _devices() -> tuple[str, ...]:
    accelerator = accelerator_with_streams()
    if accelerator is None:
        return ()
    count = torch.accelerator.device_count()
    if torch.cuda.is_available():
        return tuple(torch.cuda.get_device_name(i) for i in range(count))
    return tuple(f"{accelerator}:{i}" for i in range(count))


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _numbers(text: str) -> tuple[int, ...]:
    parts = text.split("+", maxsplit=1)[0].split(".")[:3]
    return tuple(int("".join(c for c in part if c.isdecimal()) or 0) for part in parts)
