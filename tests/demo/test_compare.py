"""What counts as a difference, and which one is reported."""

from __future__ import annotations

import torch
from torch import Tensor

from layernodes.demo.compare import Pass, first_difference


def _pass(output: Tensor, **gradients: Tensor | None) -> Pass:
    return Pass(outputs=[output], gradients=gradients, seconds=0.0)


def test_one_bit_is_a_difference() -> None:
    """The smallest change of one element is found, with its place and size."""
    weight = torch.ones(3, 4)
    changed = weight.clone()
    changed[1, 2] = torch.nextafter(torch.tensor(1.0), torch.tensor(2.0))
    difference = first_difference(_pass(weight, w=weight), _pass(weight, w=changed), rank=3)
    assert difference is not None
    assert (difference.tensor, difference.shape, difference.rank) == ("gradient of w", (3, 4), 3)
    assert difference.index == (1, 2)
    assert difference.max_abs_difference == 2**-23
    assert (difference.plain, difference.nodes) == (1.0, 1.0 + 2**-23)


def test_outputs_come_first() -> None:
    """Of several differences that of the earliest output is reported."""
    one, two = torch.ones(2), torch.full((2,), 2.0)
    difference = first_difference(_pass(one, w=one), _pass(two, w=two), rank=0)
    assert difference is not None
    assert difference.tensor == "output of microbatch 0"


def test_a_gradient_that_one_side_lacks_is_a_difference() -> None:
    """A missing gradient is never taken for equal, whichever side lacks it; on both sides it is fine."""
    one = torch.ones(2)
    missing = first_difference(_pass(one, w=one), _pass(one, w=None), rank=0)
    extra = first_difference(_pass(one, w=None), _pass(one, w=one), rank=0)
    assert missing is not None
    assert extra is not None
    assert (missing.note, extra.note) == ("only the plain model has one", "only the nodes have one")
    assert first_difference(_pass(one, w=None), _pass(one, w=None), rank=0) is None


def test_shapes_are_compared() -> None:
    """A tensor of another shape is a difference, not an error."""
    difference = first_difference(_pass(torch.ones(2)), _pass(torch.ones(3)), rank=0)
    assert difference is not None
    assert difference.note == "the nodes' has shape (3,)"
