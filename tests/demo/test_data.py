"""Tokens of the demonstration."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from layernodes.command import UsageError
from layernodes.demo.data import make_microbatches, read_text
from layernodes.demo.settings import BATCH_SIZE, SEQUENCE_LENGTH

_CPU = torch.device("cpu")


def test_tokens_are_the_bytes_of_the_text_in_order() -> None:
    """Rows of all ranks and microbatches, read in order, are the text; labels are one byte further on."""
    content = read_text(None).content
    of_ranks = [make_microbatches(content, 3, rank=rank, num_ranks=2, device=_CPU) for rank in range(2)]
    rows = [row for both in zip(*of_ranks, strict=True) for microbatch in both for row in microbatch.tokens]
    assert bytes(int(token) for row in rows for token in row) == content[: 6 * BATCH_SIZE * SEQUENCE_LENGTH]
    first = of_ranks[0][0]
    assert torch.equal(first.tokens[:, 1:], first.labels[:, :-1])
    assert first.positions.tolist() == [list(range(SEQUENCE_LENGTH))] * BATCH_SIZE


def test_the_shipped_text_is_the_opening_of_alice() -> None:
    """It is readable ASCII and long enough for the defaults on two ranks."""
    text = read_text(None)
    assert text.content.startswith(b"Alice's Adventures in Wonderland\n")
    assert text.content.isascii()
    assert len(text.content) > 2 * 4 * BATCH_SIZE * SEQUENCE_LENGTH


def test_a_text_that_is_used_up_starts_again(tmp_path: Path) -> None:
    """The shortest text allowed serves any number of microbatches."""
    path = tmp_path / "short.txt"
    path.write_bytes(b"x" * SEQUENCE_LENGTH)
    with pytest.raises(UsageError, match="has 128 bytes; it must have at least 129"):
        read_text(path)
    path.write_bytes(b"x" * (SEQUENCE_LENGTH + 1))
    assert len(make_microbatches(read_text(path).content, 50, rank=0, num_ranks=1, device=_CPU)) == 50
