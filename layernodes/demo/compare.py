"""Run a model plainly and through the nodes on the same microbatches, and find the first tensor that differs.

    plain   F0 B0  F1 B1  F2 B2  ...                            autograd over ``model(...)``
    nodes   F0     F1+B0  F2+B1  ...  B(last)                   Megatron-Core's schedule plan under ``install()``

Both passes start from the same weights and generator states, and add up each parameter's gradient over the
microbatches. Two of these are in flight in the second one, interleaved slot by slot.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from megatron.core.models.common.model_chunk_schedule_plan import TransformerModelChunkSchedulePlan
from megatron.core.models.gpt import GPTModel
from pydantic import BaseModel, ConfigDict
from torch import Tensor
from torch.nn import Module

from layernodes.demo.data import Microbatch
from layernodes.demo.model import seed_everything
from layernodes.demo.timing import SlotTimer
from layernodes.megatron import install
from layernodes.plan.layer_plan import LayerPlan

Tick = Callable[[str], None]
"""Called after each piece of work with its name."""


@dataclass(frozen=True, kw_only=True)
class Pass:
    """What one pass over all microbatches gave.

    Attributes:
        outputs: each microbatch's loss of every token, ``[batch, seq]``.
        gradients: each parameter's, by name; None where it got none.
        seconds: wall time of the pass.
    """

    outputs: Sequence[Tensor]
    gradients: Mapping[str, Tensor | None]
    seconds: float


class Difference(BaseModel):
    """The first tensor that is not the same in both passes.

    Attributes:
        tensor: its name. shape: its shape. rank: the rank that found it.
        max_abs_difference: largest absolute difference of an element.
        index: index of the first element that differs, and ``plain`` and ``nodes`` its values there.
        note: what is wrong where that is no matter of values.
    """

    model_config = ConfigDict(frozen=True)

    tensor: str
    rank: int = 0
    shape: tuple[int, ...] = ()
    max_abs_difference: float | None = None
    index: tuple[int, ...] | None = None
    plain: float | None = None
    nodes: float | None = None
    note: str = ""


def run_plain(model: GPTModel, microbatches: Sequence[Microbatch], seed: int, tick: Tick) -> Pass:
    """Forward and backward of one microbatch after the other."""
    start = begin(model, seed)
    outputs = []
    for index, microbatch in enumerate(microbatches):
        output = model(microbatch.tokens, microbatch.positions, None, labels=microbatch.labels)
        output.backward(output_gradient(output, len(microbatches)))
        outputs.append(output.detach())
        tick(f"plain F{index} B{index}")
    return end(model, outputs, start)


def run_nodes(
    model: GPTModel,
    microbatches: Sequence[Microbatch],
    seed: int,
    tick: Tick,
    plans: Mapping[Module, LayerPlan],
    timer: SlotTimer,
) -> Pass:
    """Combined 1F1B: each forward together with the backward of the microbatch before.

    ``plans`` holds the plan of each layer, in order; ``timer`` records their slots.
    """
    start = begin(model, seed)
    outputs: list[Tensor] = []
    previous, gradient = None, None
    with install(plans.__getitem__):
        for index, microbatch in enumerate(microbatches):
            plan = model.build_schedule_plan(microbatch.tokens, microbatch.positions, None, labels=microbatch.labels)
            timer.watch(plan, list(plans.values()), index)
            output = TransformerModelChunkSchedulePlan.run(plan, previous, b_grad=gradient)
            previous, gradient = plan, output_gradient(output, len(microbatches))
            outputs.append(output.detach())
            tick(f"nodes F{index}" + (f" B{index - 1}" if index else ""))
        TransformerModelChunkSchedulePlan.run(None, previous, b_grad=gradient)
        tick(f"nodes B{len(microbatches) - 1}")
    return end(model, outputs, start)


def first_difference(plain: Pass, nodes: Pass, *, rank: int) -> Difference | None:
    """The first tensor that is not bit for bit the same: outputs in microbatch order, then gradients."""
    for (name, expected), (_, actual) in zip(_named(plain), _named(nodes), strict=True):
        if expected is not None and actual is not None:
            if not torch.equal(expected, actual):
                return _difference(name, expected, actual, rank)
        elif expected is not None or actual is not None:
            note = "only the plain model has one" if actual is None else "only the nodes have one"
            return Difference(tensor=name, rank=rank, note=note)
    return None


def begin(model: GPTModel, seed: int) -> float:
    """Give both passes the same start."""
    model.zero_grad(set_to_none=True)
    seed_everything(seed)
    torch.cuda.synchronize()
    return time.perf_counter()


def end(model: GPTModel, outputs: Sequence[Tensor], start: float) -> Pass:
    torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    return Pass(outputs=outputs, gradients=gradients, seconds=seconds)


def output_gradient(output: Tensor, num_microbatches: int) -> Tensor:
    """That of the mean loss over all tokens of all microbatches."""
    return torch.full_like(output, 1.0 / (output.numel() * num_microbatches), dtype=torch.float32)


def _named(result: Pass) -> Iterator[tuple[str, Tensor | None]]:
    for index, output in enumerate(result.outputs):
        yield f"output of microbatch {index}", output
    for name, gradient in result.gradients.items():
        yield f"gradient of {name}", gradient


def _difference(name: str, expected: Tensor, actual: Tensor, rank: int) -> Difference:
    if expected.shape != actual.shape:
        note = f"the nodes' has shape {tuple(actual.shape)}"
        return Difference(tensor=name, rank=rank, shape=tuple(expected.shape), note=note)
    first = tuple(int(i) for i in (expected != actual).nonzero()[0])
    return Difference(
        tensor=name,
        rank=rank,
        shape=tuple(expected.shape),
        max_abs_difference=float((expected.double() - actual.double()).abs().max()),
        index=first,
        plain=float(expected[first]),
        nodes=float(actual[first]),
    )
