"""``docs/examples/train_bytes.py`` learns, and prints the same losses plainly and under any schedule."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.multi_token_prediction import MTPLossAutoScaler

from tests.support.full import FULL
from tests.support.ranks import values_on_ranks
from tests.support.train_bytes_ranks import forget_losses, resumed

_FOLDER = Path(__file__).parents[1] / "docs" / "examples"
_SMALL = ["--layers", "2", "--hidden", "16", "--seq", "16", "--batch", "2", "--dropout", "0.1", "--json"]

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    """Megatron-Core keeps the scales and sums of its losses for the whole process."""
    scales = MoEAuxLossAutoScaler.main_loss_backward_scale, MTPLossAutoScaler.main_loss_backward_scale
    forget_losses()
    yield
    forget_losses()
    MoEAuxLossAutoScaler.main_loss_backward_scale, MTPLossAutoScaler.main_loss_backward_scale = scales


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


def test_checkpoints_of_two_ranks(tmp_path: Path) -> None:
    """Experts on two ranks and the sharded optimizer: half a run under one schedule, the rest plainly and under another
    one from its checkpoint; the losses, and all that is in the last checkpoint, are those of a plain run."""
    options = [*_SMALL, "--ep", "2", "--distributed-optimizer", "--bf16", "--mtp", "--tied", "--microbatches", "2"]
    early = ["--schedule", "early_release", "--wgrad", "auto", "--streams", "threads"]
    ways = [[], ["--schedule", "combined_1f1b", "--streams", "inline"]]
    target = f"{resumed.__module__}:{resumed.__name__}"
    assert values_on_ranks(target, str(tmp_path), 3 if FULL else 1, options, early, ways, seconds=300.0) == [[], []]


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress(example: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A line a step; on a terminal a bar that fills, is wiped before each line and is gone at the end."""
    terminal = _Terminal()
    monkeypatch.setattr(example.sys, "stderr", terminal)
    example.main([*_SMALL[:-1], "--steps", "3", "--schedule", "serial"])
    assert [line.split()[:3] for line in capsys.readouterr().out.splitlines()] == [
        ["step", str(number), "loss"] for number in (1, 2, 3)
    ]
    wipe = "\r\x1b[K"
    drawn = [f"{wipe}[{'#' * filled}{'.' * (30 - filled)}] {step}/3" for step, filled in ((1, 10), (2, 20))]
    assert terminal.getvalue() == "".join([*drawn, wipe])


def test_no_bar_where_there_is_no_terminal(example: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """Lines only."""
    example.main([*_SMALL[:-1], "--steps", "1"])
    printed = capsys.readouterr()
    assert printed.out.startswith("step    1  loss ")
    assert printed.err == ""


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
