"""What a chunk begins with may come from a graph outside of it: gradients reach that graph as in the plain run. What it
ends with is one tensor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import layernodes
from layernodes import ChunkPlan, NodeStateError, Runner, StepError, UnsupportedLayerError, schedules
from layernodes.megatron import schedule
from tests.support.build import make_microbatches, make_model
from tests.support.configs import by_name
from tests.support.fixtures import MEGATRON_WORLD, megatron_world
from tests.support.slots import assert_equal_gradients
from tests.support.training import WAYS, Case, Way, compare

__all__ = ["megatron_world"]

pytestmark = MEGATRON_WORLD

_WAYS = (WAYS[0], WAYS[2], WAYS[4], Way(installed=True))
_EMBEDS = (
    Case(name="embeds", ddp=None, embeds=True),
    Case(name="embeds, MTP, tied, overlapped", ddp={"overlap_grad_reduce": True}, mtp=1, tied=True, embeds=True),
    Case(name="embeds, MTP, bf16", bf16=True, mtp=1, embeds=True),
    Case(name="embeds, tied", tied=True, embeds=True),
    Case(name="embeds, hybrid, tied", pattern="*E", tied=True, embeds=True),
)


@pytest.mark.parametrize("case", _EMBEDS, ids=lambda case: case.name)
def test_a_forward_step_that_embeds(case: Case) -> None:
    """An encoder of its own gets its gradients, and the embedding, which nodes use too, one gradient a microbatch."""
    ways = _WAYS[:-1] if case.pattern else _WAYS
    assert compare(case, ways, 2) == []


def _as_given(tensor: Tensor) -> Tensor:
    return tensor


def _doubled(tensor: Tensor) -> Tensor:
    return tensor * 2


@pytest.mark.parametrize("before", [None, 2.0])
@pytest.mark.parametrize("make", [_as_given, _doubled])
@pytest.mark.parametrize("cell", ["alltoall-moe-ep1", "middle-chunk-ep1"])
def test_a_tensor_of_the_callers(cell: str, make: Callable[[Tensor], Tensor], before: float | None) -> None:
    """A leaf, or made from one, in place of tokens or received: its gradient is added, and its hooks called, once, when
    backward of its microbatch is over."""
    found: list[tuple[Any, ...]] = []
    for way in ("plain", "schedule", "install"):
        model, (microbatch, *_) = make_model(by_name(cell)), make_microbatches(by_name(cell))
        generator = torch.Generator().manual_seed(1)
        leaf = torch.randn(8, 2, model.config.hidden_size, generator=generator).requires_grad_()
        if before is not None:
            leaf.grad = torch.full_like(leaf, before)
        calls: list[int] = []
        leaf.register_post_accumulate_grad_hook(lambda _, calls=calls: calls.append(1))
        inputs, given = dict(microbatch.inputs), make(leaf)
        if model.pre_process:
            inputs["decoder_input"] = given
        else:
            model.set_input_tensor(given)
        if way == "plain":
            output = model(**inputs)
            output.backward(torch.ones_like(output))
        else:
            with schedule(model, wgrad="auto", streams="inline") if way == "schedule" else layernodes.install():
                plan = model.build_schedule_plan(**inputs)
                output = type(plan).run(plan, None)
                assert not calls
                type(plan).run(None, plan, b_grad=torch.ones_like(output))
        found.append((output.detach(), leaf.grad, calls))
    for output, gradient, calls in found:
        assert torch.equal(output, found[0][0])
        assert gradient is not None
        assert torch.equal(gradient, found[0][1])
        assert calls == [1]


_OTHERS: dict[str, Callable[[Tensor], Any]] = {
    "tuple": lambda hidden: (hidden, hidden.sum()),
    "list": lambda hidden: [hidden],
    "dict": lambda hidden: {"hidden": hidden},
}


@pytest.mark.parametrize("name", _OTHERS)
@pytest.mark.parametrize("way", ["schedule", "install"])
def test_an_output_processor_that_returns_no_tensor(name: str, way: str) -> None:
    """Megatron-Core's combined step can take one tensor alone: refused by name."""
    model, (microbatch, *_) = make_model(by_name("alltoall-moe-ep1")), make_microbatches(by_name("alltoall-moe-ep1"))
    inputs = {**microbatch.inputs, "output_processor": lambda hidden_states, **_: _OTHERS[name](hidden_states)}
    with schedule(model, streams="inline") if way == "schedule" else layernodes.install():
        plan = model.build_schedule_plan(**inputs)
        with pytest.raises(UnsupportedLayerError, match=f"output processor .* a {name}, .* one tensor") as caught:
            type(plan).run(plan, None)
    assert caught.value.field == "output_processor"


@pytest.mark.parametrize("name", _OTHERS)
def test_an_output_processor_in_a_runner(name: str) -> None:
    """A tuple goes backward from each tensor in it; from anything else no backward begins, and that is said."""
    cell = by_name("alltoall-moe-ep1")
    found = []
    for plain in (True, False):
        model, (microbatch, *_) = make_model(cell), make_microbatches(cell)
        inputs = {**microbatch.inputs, "output_processor": lambda hidden_states, **_: _OTHERS[name](hidden_states)}
        if plain:
            output = model(**inputs)
            if name == "tuple":
                torch.autograd.backward(output, [torch.ones_like(t) for t in output])
        else:
            chunk = ChunkPlan.build(model)
            with Runner(streams="inline") as runner:
                order = schedules.serial(chunk.shape, 1)
                if name != "tuple":
                    with pytest.raises((NodeStateError, StepError), match=f"a {name}, from which no backward"):
                        runner.run(order, chunk, [inputs])
                    return
                output = runner.run(order, chunk, [inputs]).outputs[0]
        found.append((output, {n: p.grad for n, p in model.named_parameters()}))
    (expected, gradients), (ours, our_gradients) = found
    assert all(map(torch.equal, expected, ours))
    assert_equal_gradients(gradients, our_gradients)
