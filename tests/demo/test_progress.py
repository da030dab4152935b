"""The progress bar."""

from __future__ import annotations

import io
import time

import pytest

from layernodes.demo.progress import ProgressBar


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_it_appears_after_a_moment_and_wipes_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing in the first second; then the share done; nothing left at the end."""
    now = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    stream = _Terminal()
    bar = ProgressBar(4, stream)
    bar.tick("first")
    assert stream.getvalue() == ""
    now = 2.0
    bar.tick("second")
    assert "[###############...............] 2/4  second" in stream.getvalue()
    bar.close()
    assert stream.getvalue().endswith("\r\x1b[K")


def test_it_is_silent_where_nobody_watches(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file or pipe gets nothing."""
    stream = io.StringIO()
    bar = ProgressBar(1, stream)
    monkeypatch.setattr(time, "monotonic", lambda: float("inf"))
    bar.tick("only")
    bar.close()
    assert stream.getvalue() == ""
