"""What a lane's memory is told: every tensor of a value, however it is packed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from layernodes.lane import empty_storage, tensors_in


@dataclass
class _Pair:
    first: Tensor
    rest: Any = field(default_factory=list)


class _Hidden:
    """Holds tensors where nobody would look."""

    def __init__(self, *hidden: Tensor) -> None:
        self._hidden = hidden

    def tensors(self) -> Iterator[Tensor]:
        """All of them."""
        yield from self._hidden


def test_every_tensor_of_a_value() -> None:
    """In mappings, lists, tuples, dataclasses and what says itself what it holds, at any depth."""
    a, b, c, d, e = (torch.full((1,), float(i)) for i in range(5))
    value = {"x": [a, (b, None, 3)], "y": _Pair(c, {"z": _Hidden(d)}), "w": _Pair, "v": _Pair(e)}
    assert [t.item() for t in tensors_in(value)] == [0, 1, 2, 3, 4]
    assert [t is a for t in tensors_in(a)] == [True]
    for nothing in (None, 3, "text", _Pair, object()):
        assert list(tensors_in(nothing)) == []


def test_an_emptied_storage_is_empty_for_all() -> None:
    """Whoever shares it."""
    tensor = torch.ones(4)
    shares = tensor[1:]
    empty_storage(tensor)
    assert shares.untyped_storage().nbytes() == 0
