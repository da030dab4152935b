"""The name that was probably meant, where one is close enough to be."""

from __future__ import annotations

from difflib import get_close_matches
from functools import lru_cache
from typing import Final

_CUTOFF: Final = 0.6
"""Twice what is alike over both lengths: 'mpl' for 'mlp' passes, 'nope' for 'moe_combine' does not."""


@lru_cache(maxsize=256)
def closest(name: str, names: tuple[str, ...]) -> str | None:
    """The one of ``names`` that ``name`` is most like; None where none is plausible.

    Remembered, since one misspelling usually fills a whole schedule.
    """
    return next(iter(get_close_matches(name, names, n=1, cutoff=_CUTOFF)), None)
