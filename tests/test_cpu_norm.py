"""The norm that the CPU host puts in Transformer Engine's place in a hybrid stack."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from layernodes._cpu_norm import host_norm
from layernodes.errors import UnsupportedLayerError


def _config(**fields: object) -> SimpleNamespace:
    usual = {
        "normalization": "LayerNorm",
        "layernorm_zero_centered_gamma": False,
        "params_dtype": torch.bfloat16,
        "sequence_parallel": True,
    }
    return SimpleNamespace(**{**usual, **fields})


@pytest.mark.parametrize("kind, wanted", [("LayerNorm", torch.nn.LayerNorm), ("RMSNorm", torch.nn.RMSNorm)])
def test_kind_type_and_marks(kind: str, wanted: type) -> None:
    """As the configuration says; its parameters tell that a sequence-parallel group shares them."""
    norm = host_norm(config=_config(normalization=kind), hidden_size=4, eps=0.5)
    assert type(norm) is wanted
    assert norm.eps == 0.5
    assert {(p.dtype, p.sequence_parallel) for p in norm.parameters()} == {(torch.bfloat16, True)}


@pytest.mark.parametrize("field, value", [("normalization", "L2Norm"), ("layernorm_zero_centered_gamma", True)])
def test_what_it_does_not_have(field: str, value: object) -> None:
    """Refused with field and value."""
    with pytest.raises(UnsupportedLayerError) as raised:
        host_norm(_config(**{field: value}), 4)
    assert (raised.value.field, raised.value.value) == (field, value)
