"""Leaving ``schedule()`` leaves nothing of it in Megatron-Core: every module, class and configuration is as before."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch

from layernodes.megatron import schedule
from layernodes.training import ChunkSchedulePlan
from tests.support.fixtures import MEGATRON_WORLD, megatron_world
from tests.support.training import BATCH, SEQ, VOCAB, Case, Trainer

__all__ = ["megatron_world"]

pytestmark = MEGATRON_WORLD


def _names() -> dict[tuple[str, ...], Any]:
    """Everything that Megatron-Core's modules, and the classes defined in them, hold by name."""
    found: dict[tuple[str, ...], Any] = {}
    for name, module in list(sys.modules.items()):
        if not name.startswith("megatron.core"):
            continue
        for key, value in vars(module).items():
            found[name, key] = value
            if isinstance(value, type) and value.__module__ == name:
                found |= {(name, key, attribute): held for attribute, held in vars(value).items()}
    return found


def _step(model: Any) -> None:
    tokens = torch.randint(VOCAB, (BATCH, SEQ))
    positions = torch.arange(SEQ).expand(BATCH, SEQ).contiguous()
    plan = model.build_schedule_plan(tokens, positions, None, labels=tokens)
    assert isinstance(plan, ChunkSchedulePlan)
    output = ChunkSchedulePlan.run(plan, None)
    assert output is not None
    ChunkSchedulePlan.run(None, plan, b_grad=torch.ones_like(output))


@pytest.mark.parametrize("wgrad", ["auto", "off"])
def test_every_name_of_megatron(wgrad: str) -> None:
    """After a step inside, and after one that failed; inside, the one name that is replaced is the model's."""
    model = Trainer(Case(name="restored", ddp=None, mtp=1)).chunks[0]
    configs = {id(m.config): m.config for m in model.modules() if hasattr(m, "config")}
    with schedule(model, wgrad=wgrad):
        _step(model)  # what Megatron-Core itself makes on first use is there from now on
    before = _names()
    values = {key: dict(vars(config)) for key, config in configs.items()}
    assert len(before) > 1000
    with schedule(model, wgrad=wgrad):
        inside = _names()
        _step(model)
    with pytest.raises(ZeroDivisionError), schedule(model, wgrad=wgrad):
        _step(model)
        raise ZeroDivisionError
    after = _names()
    assert {key[1:] for key in before if before[key] is not inside[key]} == {("GPTModel", "build_schedule_plan")}
    assert before.keys() == after.keys()
    assert [key for key in before if before[key] is not after[key]] == []
    assert {key: dict(vars(config)) for key, config in configs.items()} == values
