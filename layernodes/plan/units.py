"""Seconds and bytes as people read them."""

from __future__ import annotations


def in_seconds(seconds: float) -> str:
    """A time with a unit that suits it, to four digits."""
    size = abs(seconds)
    if size == 0 or size >= 1:
        return f"{seconds:.4g} s"
    if size >= 0.9995e-3:
        return f"{seconds * 1e3:.4g} ms"
    return f"{seconds * 1e6:.4g} us"


def in_bytes(count: int) -> str:
    """A number of bytes with a binary unit that suits it."""
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{value:.4g} {unit}"
        value /= 1024
    return f"{value:.4g} TiB"
