"""Importing Megatron-Core without its remarks on what is not installed."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quiet_import() -> Iterator[None]:
    """Import under it what warns of each optional package that is missing (Transformer Engine, Apex, absl).

    A program that turns warnings into errors could not import it otherwise. torch's extension builder, which
    Megatron-Core imports, logs where it finds a CUDA toolkit but no GPU.
    """
    logger = logging.getLogger("torch.utils.cpp_extension")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
