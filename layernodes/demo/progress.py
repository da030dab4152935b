"""A progress bar for a terminal."""

from __future__ import annotations

import time
from typing import Final, TextIO, final

_WIDTH: Final = 30
_PATIENCE: Final = 1.0  # seconds until it appears


@final
class ProgressBar:
    """Draws ``total`` ticks on one line of ``stream``, and wipes it when closed.

    Shows nothing before a second has passed, and nothing at all where ``stream`` is None or no terminal.
    """

    def __init__(self, total: int, stream: TextIO | None) -> None:
        self._total = total
        self._stream = stream if stream is not None and stream.isatty() else None
        self._done = 0
        self._appears = time.monotonic() + _PATIENCE

    def tick(self, label: str) -> None:
        """One more is done, the one that ``label`` names."""
        self._done += 1
        if self._stream is not None and time.monotonic() >= self._appears:
            filled = _WIDTH * self._done // self._total
            bar = "#" * filled + "." * (_WIDTH - filled)
            self._stream.write(f"\r\x1b[K[{bar}] {self._done}/{self._total}  {label}")
            self._stream.flush()

    def close(self) -> None:
        """Wipe the line."""
        if self._stream is not None and time.monotonic() >= self._appears:
            self._stream.write("\r\x1b[K")
            self._stream.flush()
