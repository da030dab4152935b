"""Where the trainer's functions run: on the streams, and the thread, on which Megatron-Core calls them."""

from __future__ import annotations

import threading
from functools import partial
from typing import Any

import pytest
import torch

from layernodes.megatron import schedule
from layernodes.plan import pairs
from layernodes.plan.chunk_run import ChunkRun
from layernodes.training import ChunkSchedulePlan
from tests.support.build import make_microbatches, make_model
from tests.support.configs import by_name
from tests.support.device import stand_in_device
from tests.support.fixtures import MEGATRON_WORLD, megatron_world
from tests.support.training import BATCH, SEQ, VOCAB, Case, Trainer, zipper

__all__ = ["megatron_world"]

pytestmark = MEGATRON_WORLD

_CALLS = ("pre_forward", "pre_backward", "post_forward", "post_backward")
_LAYERS = "MD"  # the last layer ends on the compute stream, so a send on the other one has to wait
_ORDERS: tuple[Any, ...] = (*pairs.BUILT_IN, zipper)


def _whole() -> tuple[Any, dict[str, Any]]:
    tokens = torch.randint(VOCAB, (BATCH, SEQ))
    inputs = {
        "input_ids": tokens,
        "position_ids": torch.arange(SEQ).expand(BATCH, SEQ).contiguous(),
        "attention_mask": None,
        "labels": tokens,
    }
    return Trainer(Case(name="calls", ddp=None, layers=_LAYERS)).chunks[0], inputs


def _middle() -> tuple[Any, dict[str, Any]]:
    """A pipeline's middle stage: its backward begins on the communication stream."""
    cell = by_name("middle-chunk-ep1")
    (microbatch,) = make_microbatches(cell)[:1]
    model = make_model(cell)
    model.set_input_tensor(microbatch.hidden_states)
    return model, dict(microbatch.inputs)


@pytest.mark.parametrize("order", _ORDERS, ids=lambda order: getattr(order, "__name__", order))
@pytest.mark.parametrize("streams", ["inline", "threads"])
def test_threads_make_all_calls_from_the_callers(order: Any, streams: str) -> None:
    """Two threads would race in the pipeline's process group."""
    model, inputs = _whole()
    found: list[tuple[str, str]] = []

    def call(name: str, *_: Any) -> None:
        found.append((name, threading.current_thread().name))

    with schedule(model, order, wgrad="auto", streams=streams):
        before, after = (model.build_schedule_plan(**inputs) for _ in "ab")
        output = ChunkSchedulePlan.run(before, None)
        assert output is not None
        calls = {name: partial(call, name) for name in _CALLS}
        ChunkSchedulePlan.run(after, before, b_grad=torch.ones_like(output), **calls)
    assert sorted(found) == sorted((name, threading.current_thread().name) for name in _CALLS)


@pytest.mark.parametrize("order", _ORDERS, ids=lambda order: getattr(order, "__name__", order))
@pytest.mark.parametrize("make", [_whole, _middle])
def test_streams_of_the_calls(make: Any, order: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The forward send on the communication stream, the others on the caller's, each behind the passes that it follows
    and before those that it precedes."""
    model, inputs = make()
    with stand_in_device() as device:
        compute = device.stream
        known: dict[str, set[str]] = {}
        streams: dict[str, bool] = {}

        def noting(name: str, own: Any) -> Any:
            def run(self: ChunkRun, index: int, lane: Any = None) -> None:
                place = self.plan.places[index]
                if place.node is not None:
                    text = f"{name}.{place.layer}.{place.slot}"
                    known[text] = device.issue(text)
                own(self, index, lane)

            return run

        def call(name: str, *_: Any) -> None:
            streams[name] = device.stream is compute
            known[name] = device.issue(name)

        with schedule(model, order, wgrad="auto", streams="cuda"):
            before, after = (model.build_schedule_plan(**inputs) for _ in "ab")
            output = ChunkSchedulePlan.run(before, None)
            assert output is not None
            for name, method in (("F", "forward"), ("B", "backward"), ("W", "weight_gradients")):
                monkeypatch.setattr(ChunkRun, method, noting(name, getattr(ChunkRun, method)))
            ChunkSchedulePlan.run(
                after, before, b_grad=torch.ones_like(output), **{name: partial(call, name) for name in _CALLS}
            )
            assert device.stream is compute
    assert streams == {"pre_forward": True, "pre_backward": True, "post_forward": False, "post_backward": True}
    forward = {text for text in known if text.startswith("F")}
    backward = {text for text in known if text.startswith("B")}
    assert len(forward) == len(backward) == (8 if make is _whole else 9)
    assert all("pre_forward" in known[text] for text in forward)
    assert all("pre_backward" in known[text] for text in backward)
    assert forward - {"F.None.post_process"} <= known["post_forward"]
    assert backward - {"B.None.pre_process"} <= known["post_backward"]
    assert "post_forward" in known["post_backward"]
    # What the next stages receive is sent before the first layer's weight gradients and the chunk's ends.
    first = "W.0.pre_dispatch_computation"
    if order is not zipper:
        assert "post_backward" in known[first]
        assert not any(first in known[name] for name in _CALLS)


@pytest.mark.parametrize("before", [None, 2.0])
def test_the_gradient_of_what_the_pipeline_received(before: float | None) -> None:
    """It is where the trainer looks for it: added to the received tensor's, as plain autograd does."""
    (model, inputs), found = _middle(), []
    for scheduled in (False, True):
        received = model.decoder.input_tensor.detach().clone().requires_grad_()
        if before is not None:
            received.grad = torch.full_like(received, before)
        model.set_input_tensor(received)
        if scheduled:
            with schedule(model, streams="inline"):
                plan = model.build_schedule_plan(**inputs)
                output = ChunkSchedulePlan.run(plan, None)
                assert output is not None
                ChunkSchedulePlan.run(None, plan, b_grad=torch.ones_like(output))
        else:
            output = model(**inputs)
            output.backward(torch.ones_like(output))
        found.append((output.detach(), received.grad))
    (expected, gradient), (ours, our_gradient) = found
    assert torch.equal(expected, ours)
    assert torch.equal(gradient, our_gradient)
