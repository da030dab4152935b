"""The servers of workers answer line by line: one line left unread would be taken for the next worker's."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from tests.support.launched import launched
from tests.support.workers import workers


def sleep(rank: int, world_size: int, folder: Path) -> None:
    """A worker's main."""
    time.sleep(60)


def test_a_worker_that_ends_as_it_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process is gone, and its exit code not yet read."""
    kill = os.kill

    def too_late(process: int, number: int) -> None:
        kill(process, number)
        raise ProcessLookupError

    with monkeypatch.context() as patch, workers(f"{__name__}:sleep", 1, tmp_path) as (worker,):
        patch.setattr(os, "kill", too_late)
        worker.kill()
    assert worker.wait(0.0) == -signal.SIGKILL
    assert launched("-c", "raise SystemExit(3)", really=False).returncode == 3
