"""The benchmarks run; what they find is for ``make bench``."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import gpu

_ROOT = Path(__file__).parents[1]


def _run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "ignore", "-m", *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=_ROOT, env=environment, capture_output=True, text=True, timeout=540, check=False)


def test_the_device_benchmark_on_a_cpu() -> None:
    """Its schedules and figures, on inline streams: nothing is hidden there, and the parts make the whole."""
    options = Namespace(layers=2, tokens=16, hidden=8, microbatches=2, repetitions=5)
    found = gpu.measure_overlap(options, torch.device("cpu"), "inline")
    assert set(found) == {"serial", "combined_1f1b"}
    for times in found.values():
        assert times["compute"] > 0 and times["comm"] > 0
        assert times["compute"] + times["comm"] <= 1.001 * times["makespan"]
    assert found["serial"]["hidden_share"] == 0


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is an accelerator")
def test_without_an_accelerator_it_says_so() -> None:
    """And measures nothing."""
    done = _run("benchmarks.gpu")
    assert (done.returncode, done.stdout) == (3, "")
    assert "no accelerator" in done.stderr


@pytest.mark.full
def test_every_benchmark_runs() -> None:
    """Each once, at its smallest."""
    done = _run("benchmarks", "--quick", "host_overhead", "step_time", "memory", "scaling", "gpu")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.full
@pytest.mark.parametrize("arguments", ["scaling --repetitions 1", "host_overhead --repetitions 1", "memory --quick"])
def test_json(arguments: str) -> None:
    """One document and nothing else on standard output."""
    done = _run(*f"benchmarks.{arguments} --json".split())
    found: dict[str, Any] = json.loads(done.stdout)
    assert found
