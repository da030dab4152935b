"""What a pipeline stage sends on is freed once the trainer deallocates it, as under Megatron-Core's own plan."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from megatron.core.pipeline_parallel.schedules import deallocate_output_tensor

from layernodes.megatron import schedule
from layernodes.release import num_storage_holders
from tests.support.build import make_microbatches, make_model
from tests.support.configs import by_name
from tests.support.fixtures import MEGATRON_WORLD, megatron_world
from tests.support.slots import assert_equal_gradients

__all__ = ["megatron_world"]

pytestmark = MEGATRON_WORLD


@pytest.mark.parametrize("wgrad", ["off", "auto"])
@pytest.mark.parametrize("deallocates", [False, True])
def test_deallocated_outputs(deallocates: bool, wgrad: str) -> None:
    """Nobody but the tensor handed over holds its storage where it is deallocated; gradients are the plain ones."""
    cell, found = by_name("middle-chunk-ep1"), []
    for plain in (True, False):
        model, microbatches = make_model(cell), make_microbatches(cell)[:2]
        sent: list[Any] = []
        model.config.deallocate_pipeline_outputs = deallocates
        if plain:
            for one in microbatches:
                model.set_input_tensor(one.hidden_states)
                output = model(**one.inputs)
                sent.append(output.detach().clone())
                output.backward(one.output_grad)
        else:
            with schedule(model, wgrad=wgrad, streams="inline"):
                before = None
                for one in microbatches:
                    model.set_input_tensor(one.hidden_states)
                    plan = model.build_schedule_plan(**one.inputs)
                    output = type(plan).run(plan, before, b_grad=microbatches[0].output_grad)
                    sent.append(output.detach().clone())
                    assert (num_storage_holders(output) == 1) is deallocates
                    deallocate_output_tensor(output, deallocates)
                    before = plan
                type(plan).run(None, plan, b_grad=microbatches[1].output_grad)
        found.append((sent, {name: p.grad for name, p in model.named_parameters()}))
    (expected, gradients), (ours, our_gradients) = found
    assert all(map(torch.equal, expected, ours))
    assert_equal_gradients(gradients, our_gradients)
