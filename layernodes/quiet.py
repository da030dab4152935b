"""Megatron-Core without its remarks on what is not installed, or not to its taste."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager


@contextmanager
def quiet(logger_name: str) -> Iterator[None]:
    """No warnings, and of one logger errors only."""
    logger = logging.getLogger(logger_name)
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


def quiet_import() -> AbstractContextManager[None]:
    """Import under it what warns of each optional package that is missing (Transformer Engine, Apex, absl).

    A program that turns warnings into errors could not import it otherwise. torch's extension builder, which
    Megatron-Core imports, logs where it finds a CUDA toolkit but no GPU.
    """
    return quiet("torch.utils.cpp_extension")
