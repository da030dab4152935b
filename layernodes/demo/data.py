"""Tokens: the bytes of a text, cut into microbatches."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Final, NamedTuple

import torch
from torch import Tensor

from layernodes.command import UsageError
from layernodes.demo.settings import BATCH_SIZE, SEQUENCE_LENGTH

VOCABULARY_SIZE: Final = 256
_SHIPPED: Final = "alice.txt"


class Text(NamedTuple):
    """A text and what to call it."""

    name: str
    content: bytes


class Microbatch(NamedTuple):
    """``tokens``, ``positions`` and ``labels`` (the tokens one further on), each ``[batch, seq]`` of int64."""

    tokens: Tensor
    positions: Tensor
    labels: Tensor


def read_text(path: Path | None) -> Text:
    """Read a file, or the text that the package ships; UsageError where it is missing or too short."""
    try:
        content = files(__package__).joinpath(_SHIPPED).read_bytes() if path is None else path.read_bytes()
    except OSError as error:
        raise UsageError(f"--text {path} cannot be read: {error.strerror}; give a text file") from None
    text = Text(_SHIPPED if path is None else path.name, content)
    if len(content) <= SEQUENCE_LENGTH:
        raise UsageError(
            f"--text {path} has {len(content)} bytes; it must have at least {SEQUENCE_LENGTH + 1}, "
            f"a sequence of {SEQUENCE_LENGTH} and the byte that follows it"
        )
    return text


def make_microbatches(
    content: bytes, num_microbatches: int, *, rank: int, num_ranks: int, device: torch.device
) -> Sequence[Microbatch]:
    """This rank's microbatches: consecutive stretches of the text, dealt out to the ranks in turn.

    A text that is used up starts again near its top.
    """
    tokens = torch.tensor(list(content), dtype=torch.int64)
    num_starts = len(content) - SEQUENCE_LENGTH

    def microbatch(index: int) -> Microbatch:
        first = (index * num_ranks + rank) * BATCH_SIZE
        starts = [(first + row) * SEQUENCE_LENGTH % num_starts for row in range(BATCH_SIZE)]
        rows = torch.stack([tokens[start : start + SEQUENCE_LENGTH + 1] for start in starts]).to(device)
        positions = torch.arange(SEQUENCE_LENGTH, device=device).expand(BATCH_SIZE, -1).contiguous()
        return Microbatch(rows[:, :-1].contiguous(), positions, rows[:, 1:].contiguous())

    return [microbatch(index) for index in range(num_microbatches)]
