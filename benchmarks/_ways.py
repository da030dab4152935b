"""Ways to run the same microbatches forward and backward: plainly, and under Megatron-Core's schedule plan.

Whose plan it is depends on the context: Megatron-Core's own, our nodes under it (``install()``), or ours
(``layernodes.megatron.schedule()``). A batch is what a runner takes; outputs are returned without their graphs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from layernodes.demo.data import make_microbatches, read_text
from layernodes.demo.settings import DemoSettings
from layernodes.demo.world import World

Batches = Sequence[Mapping[str, Any]]


def demo_batches(settings: DemoSettings, world: World) -> tuple[Batches, Sequence[Tensor]]:
    """The demonstration's microbatches, and gradients of their losses."""
    microbatches = make_microbatches(
        read_text(None).content,
        settings.microbatches,
        rank=world.rank,
        num_ranks=world.num_ranks,
        device=world.device,
    )
    batches = [
        {"input_ids": m.tokens, "position_ids": m.positions, "attention_mask": None, "labels": m.labels}
        for m in microbatches
    ]
    return batches, [torch.ones(m.labels.shape, device=world.device) for m in microbatches]


def plain(model: Any, batches: Batches, gradients: Sequence[Tensor]) -> list[Tensor]:
    """``model(...)`` and autograd, microbatch after microbatch."""
    outputs = []
    for batch, gradient in zip(batches, gradients, strict=True):
        output = model(**_received(model, batch))
        outputs.append(output.detach())
        output.backward(gradient)
        del output
    return outputs


def serial_plans(model: Any, batches: Batches, gradients: Sequence[Tensor]) -> list[Tensor]:
    """A schedule plan for each microbatch, forward and then backward."""
    outputs = []
    for batch, gradient in zip(batches, gradients, strict=True):
        plan = model.build_schedule_plan(**_received(model, batch))
        outputs.append(type(plan).run(plan, None).detach())
        type(plan).run(None, plan, b_grad=gradient)
    return outputs


def combined_plans(model: Any, batches: Batches, gradients: Sequence[Tensor]) -> list[Tensor]:
    """Each microbatch's forward beside the backward of the one before, as in Megatron-Core's combined 1F1B."""
    outputs = []
    backward, gradient = None, None
    for batch, next_gradient in zip(batches, gradients, strict=True):
        forward = model.build_schedule_plan(**_received(model, batch))
        outputs.append(type(forward).run(forward, backward, b_grad=gradient).detach())
        backward, gradient = forward, next_gradient
    type(backward).run(None, backward, b_grad=gradient)
    return outputs


def _received(model: Any, batch: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of the model's forward, what it received from the pipeline handed over."""
    arguments = dict(batch)
    if "hidden_states" in arguments:
        model.set_input_tensor(arguments.pop("hidden_states"))
    return arguments
