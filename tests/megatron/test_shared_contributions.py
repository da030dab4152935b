"""A node of Megatron-Core's own plan that uses a shared parameter more than once."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import layer_norm

import layernodes
from tests.support.compare import run_cell
from tests.support.configs import by_name
from tests.support.fixtures import MEGATRON_WORLD, megatron_world  # noqa: F401

pytestmark = MEGATRON_WORLD


def _twice(self: torch.nn.LayerNorm, x: Tensor) -> Tensor:
    once = layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)
    return layer_norm(once, self.normalized_shape, self.weight, self.bias, self.eps)


def test_each_use_is_added_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """A repeated MTP layer's norms, each used twice in its node: to the sum of the later depth autograd adds one use
    after the other, ``(sum + a) + b``, as in the plain model, and not ``sum + (a + b)``."""
    monkeypatch.setattr(torch.nn.LayerNorm, "forward", _twice)
    verdict = run_cell(by_name("mtp-repeated-ep1"), layernodes.install)
    assert verdict.status == "right", verdict
