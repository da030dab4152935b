"""``docs/examples/train_bytes.py`` learns, and prints the same losses plainly and under any schedule."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from megatron.core.transformer.moe.moe_logging import destroy_moe_metrics_tracker
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.multi_token_prediction import MTPLossAutoScaler, MTPLossLoggingHelper

from tests.support.full import FULL

_FOLDER = Path(__file__).parents[1] / "docs" / "examples"
_SMALL = ["--layers", "2", "--hidden", "16", "--seq", "16", "--batch", "2", "--dropout", "0.1", "--json"]

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    """Megatron-Core keeps the scales and sums of its losses for the whole process."""
    scales = MoEAuxLossAutoScaler.main_loss_backward_scale, MTPLossAutoScaler.main_loss_backward_scale
    MoEAuxLossAutoScaler.main_loss_backward_scale = None
    MTPLossAutoScaler.main_loss_backward_scale = torch.tensor(1.0)
    yield
    MoEAuxLossAutoScaler.main_loss_backward_scale, MTPLossAutoScaler.main_loss_backward_scale = scales
    destroy_moe_metrics_tracker()
    MTPLossLoggingHelper.tracker.clear()
    get_cuda_rng_tracker().reset()


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The example as a module."""
    monkeypatch.syspath_prepend(str(_FOLDER))
    import train_bytes  # noqa: PLC0415 - it lies outside the package

    return train_bytes


def _losses(example: Any, capsys: pytest.CaptureFixture[str], *arguments: str) -> list[float]:
    example.main([*_SMALL, *arguments])
    losses: list[float] = json.loads(capsys.readouterr().out)["losses"]
    return losses


def test_same_losses_and_checkpoints(example: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Plainly, under schedules, and in two halves over a checkpoint."""
    options = ["--mtp", "--tied", "--steps", "4"]
    plain = _losses(example, capsys, *options)
    assert len(plain) == 4
    scheduled = ["--schedule", "combined_1f1b", "--wgrad", "auto"]
    assert _losses(example, capsys, *options, *scheduled) == plain
    kept = str(tmp_path / "kept")
    early = ["--schedule", "early_release", "--streams", "inline"]
    assert _losses(example, capsys, *options[:-1], "2", *early, "--save", kept) == plain[:2]
    assert _losses(example, capsys, *options, "--load", kept) == plain[2:]
    assert _losses(example, capsys, *options, *scheduled, "--load", kept) == plain[2:]


def test_it_learns(example: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """The loss falls by half; the lines of the default output."""
    small = [] if FULL else ["--steps", "30", "--hidden", "32", "--layers", "2", "--lr", "1e-2"]
    example.main([*small, "--schedule", "combined_1f1b", "--wgrad", "auto"])
    lines = capsys.readouterr().out.splitlines()
    losses = [float(line.split()[-1]) for line in lines]
    assert lines[0].startswith("step    1  loss 5.")
    assert sum(losses[-5:]) / 5 < losses[0] / 2


def test_a_hybrid_model(example: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """The same losses plainly and under schedules, of the default pattern and of another; it learns."""
    for options in ([], ["--pattern", "*E-*-", "--mtp", "--tied"]):
        hybrid = ["--model", "hybrid", "--steps", "6", "--lr", "1e-2", *options]
        plain = _losses(example, capsys, *hybrid)
        assert plain[-1] < plain[0]
        assert _losses(example, capsys, *hybrid, "--schedule", "combined_1f1b", "--wgrad", "auto") == plain
    from bytes_hybrid import layer_pattern  # noqa: PLC0415 - it lies outside the package

    with pytest.raises(SystemExit, match="does not divide by 4 stages"):
        layer_pattern(example.read_options(["--layers", "2", "--pp", "2", "--vpp", "2"]))


@pytest.mark.full
@pytest.mark.skipif(not FULL, reason="starts nine launchers; in `make full`")
@pytest.mark.parametrize(
    "world_size, layout",
    [
        (2, ["--ep", "2", "--distributed-optimizer", "--bf16"]),
        (4, ["--ep", "2", "--pp", "2", "--vpp", "2"]),
        (4, ["--ep", "2", "--pp", "2", "--vpp", "2", "--model", "hybrid", "--mtp"]),
    ],
)
def test_launched(world_size: int, layout: list[str]) -> None:
    """``torchrun`` on two and on four processes."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
    command = [*launch, "--nproc-per-node", str(world_size), "train_bytes.py", *_SMALL, "--layers", "4", *layout]
    found = []
    for way in ([], ["--schedule", "combined_1f1b", "--wgrad", "auto"], ["--schedule", "early_release"]):
        done = subprocess.run(
            [*command, "--steps", "3", "--mtp", "--tied", *way],
            cwd=_FOLDER,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(_FOLDER.parents[1])},
            stdout=subprocess.PIPE,
            timeout=500,
            check=True,
        )
        found.append(json.loads(done.stdout)["losses"])
    assert found[0] == found[1] == found[2]
