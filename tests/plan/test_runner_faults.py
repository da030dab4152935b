"""Faults: whatever a step raises surfaces once, at once, and leaves nothing behind (case 15)."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from torch import Tensor

from layernodes import ChunkPlan, LayerPlan, NodeStateError, Runner, Slot, Step, StepError, schedules
from tests.support import toy
from tests.support.configs import by_name
from tests.support.fixtures import MEGATRON_WORLD, megatron_world  # noqa: F401
from tests.support.runs import Bench

pytestmark = MEGATRON_WORLD
STREAMS = ["inline", "threads"]


@pytest.fixture(autouse=True)
def no_thread_left() -> Iterator[None]:
    """No thread outlives a test by more than it takes to end."""
    yield
    deadline = time.monotonic() + 2
    while any(t.name.startswith("layernodes") for t in threading.enumerate()):
        assert time.monotonic() < deadline, threading.enumerate()
        time.sleep(0.01)


@pytest.mark.parametrize("streams", STREAMS)
@pytest.mark.parametrize("slot", toy.SLOTS)
@pytest.mark.parametrize("phase", ["F", "B"])
def test_an_exception_at_every_kind_of_step(phase: str, slot: Slot, streams: str) -> None:
    """One StepError with step, layer, microbatch and completed steps, within a second; then the chunk serves on."""
    layers, batches = toy.toys(), toy.inputs()
    chunk = toy.chunk_of(layers)
    schedule = schedules.combined_1f1b(chunk.shape, 3)
    wanted = Step.parse(f"{phase}1.L1.{slot.value}")
    outputs, input_grads, grads = toy.plain(layers, batches)

    def arm(step: Step) -> None:
        if step == wanted:  # on the lane that comes to this slot next
            layers[1].fuse.armed = (phase, slot)

    with Runner(streams=streams, before_step=arm) as runner:
        began = time.monotonic()
        with pytest.raises(StepError, match="planted") as caught:
            runner.run(schedule, chunk, batches)
        assert time.monotonic() - began < 1
        error = caught.value
        assert error.step == str(wanted)
        assert (error.layer, error.microbatch) == (1, 1)
        assert isinstance(error.__cause__, ValueError)
        texts = [str(step) for step in schedule]
        assert set(error.completed) <= set(texts)
        assert str(wanted) not in error.completed
        if streams == "inline":
            assert list(error.completed) == texts[: texts.index(str(wanted))]
        for layer in layers:
            layer.fuse.armed = None
            layer.zero_grad()
            layer.fuse.error = RuntimeError  # would tell a second failure from the first
        wanted = Step.parse("F9.none")
        result = runner.run(schedule, chunk, batches)
    for found, expected in ((result.outputs, outputs), (result.input_grads, input_grads)):
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))  # type: ignore[arg-type]
    parameters = [p.grad for layer in layers for p in layer.parameters()]
    assert all(torch.equal(a, b) for a, b in zip(parameters, toy.summed(grads, [0, 1, 2]), strict=True))  # type: ignore[arg-type]


@pytest.mark.parametrize("streams", STREAMS)
@pytest.mark.parametrize("place", ["next_comm", "end"])
@pytest.mark.parametrize("slot", [Slot.PRE_DISPATCH_COMPUTATION, Slot.MLP])
def test_an_exception_in_a_weight_gradient(slot: Slot, place: str, streams: str) -> None:
    """The same of ``W``: nothing is left pending, no later weight gets a gradient, and the chunk serves on."""
    layers, batches = toy.toys(), toy.inputs()
    chunk = ChunkPlan.of([LayerPlan.build(layer, nodes=toy.NODES, wgrad="auto") for layer in layers])
    schedule = schedules.deferred(schedules.combined_1f1b(chunk.shape, 3), chunk.shape, place)
    wanted = Step.parse(f"W1.L1.{slot.value}")
    texts = [str(step) for step in schedule]
    assert str(wanted) in texts
    outputs, input_grads, grads = toy.plain(layers, batches)
    linear = layers[1].first if slot is Slot.PRE_DISPATCH_COMPUTATION else layers[1].second
    running: dict[int, Step] = {}  # by thread

    def planted(_: Tensor) -> None:
        if running[threading.get_ident()] == wanted:
            raise ValueError("planted")

    handle = linear.weight.register_post_accumulate_grad_hook(planted)

    def note(step: Step) -> None:
        running[threading.get_ident()] = step

    with Runner(streams=streams, before_step=note) as runner:
        with pytest.raises(StepError, match="planted") as caught:
            runner.run(schedule, chunk, batches)
        error = caught.value
        assert (error.step, error.layer, error.microbatch) == (str(wanted), 1, 1)
        assert isinstance(error.__cause__, ValueError)
        if streams == "inline":
            assert list(error.completed) == texts[: texts.index(str(wanted))]
        handle.remove()
        for layer in layers:
            layer.zero_grad()
        result = runner.run(schedule, chunk, batches)
    for found, expected in ((result.outputs, outputs), (result.input_grads, input_grads)):
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))  # type: ignore[arg-type]
    parameters = [p.grad for layer in layers for p in layer.parameters()]
    assert all(torch.equal(a, b) for a, b in zip(parameters, toy.summed(grads, [0, 1, 2]), strict=True))  # type: ignore[arg-type]


@pytest.mark.parametrize("slot", toy.SLOTS)
def test_a_failed_run_keeps_no_tensor(slot: Slot) -> None:
    """Once the error is dropped, no tensor of the run is alive: without a garbage collection."""
    layers, batches = toy.toys(), toy.inputs()
    chunk = toy.chunk_of(layers)
    seen: list[weakref.ref[Tensor]] = []
    _remember(layers, seen)
    layers[1].fuse.armed = ("B", slot)
    gc.collect()
    gc.disable()
    try:
        for streams in ("threads", "inline"):
            with Runner(streams=streams) as runner, pytest.raises(StepError):
                runner.run(schedules.combined_1f1b(chunk.shape, 3), chunk, batches)
            time.sleep(0.05)
            assert seen
            alive = [ref for ref in seen if ref() is not None]
            assert not alive, f"{len(alive)} of {len(seen)} under {streams}"
            seen.clear()
    finally:
        gc.enable()


@pytest.mark.parametrize("streams", STREAMS)
def test_an_error_that_is_kept_keeps_no_run(streams: str) -> None:
    """What the steps before the failed one had made is gone while the caller still holds the error."""
    layers, batches = toy.toys(), toy.inputs(2)
    chunk = toy.chunk_of(layers)
    seen: list[weakref.ref[Tensor]] = []
    _remember(layers[:1], seen)
    layers[1].fuse.armed = ("F", Slot.MOE_COMBINE)
    gc.collect()
    gc.disable()
    try:
        with Runner(streams=streams) as runner, pytest.raises(StepError) as caught:
            runner.run(schedules.forward_forward(chunk.shape, 2), chunk, batches)
        assert caught.value.__traceback__ is not None
        assert len(seen) == 4
        assert [ref() for ref in seen] == [None] * 4
    finally:
        gc.enable()


def _remember(layers: list[toy.Toy], seen: list[weakref.ref[Tensor]]) -> None:
    """Keep weak references to what the linears make."""

    def hook(_: Any, args: Any, output: Tensor) -> None:
        seen.append(weakref.ref(output))

    for layer in layers:
        layer.first.register_forward_hook(hook)
        layer.second.register_forward_hook(hook)


@pytest.mark.parametrize("streams", STREAMS)
def test_the_other_lane_may_be_in_a_long_step(streams: str) -> None:
    """An error is reported while the other lane still works; that lane's thread ends with its step."""
    layers, batches = toy.toys(), toy.inputs(2)
    chunk = toy.chunk_of(layers)
    schedule = schedules.combined_1f1b(chunk.shape, 2)

    def hold(step: Step) -> None:
        if str(step) == "B0.L1.moe_combine":
            time.sleep(1.5)
        if str(step) == "F1.L0.pre_dispatch_computation":
            raise KeyError("planted")

    began = time.monotonic()
    with pytest.raises(StepError) as caught:
        Runner(streams=streams, before_step=hold).run(schedule, chunk, batches)
    assert caught.value.step == "F1.L0.pre_dispatch_computation"
    assert time.monotonic() - began < (1.2 if streams == "threads" else 3)


@pytest.mark.parametrize("streams", STREAMS)
def test_an_interrupt_is_no_step_error(streams: str) -> None:
    """KeyboardInterrupt passes as it is, from either lane."""
    for slot in (Slot.MLP, Slot.MOE_COMBINE):
        layers = toy.toys()
        layers[0].fuse.armed = ("F", slot)
        layers[0].fuse.error = KeyboardInterrupt
        chunk = toy.chunk_of(layers)
        with pytest.raises(KeyboardInterrupt):
            Runner(streams=streams).run(schedules.serial(chunk.shape, 1), chunk, toy.inputs(1))


@pytest.mark.parametrize("streams", STREAMS)
@pytest.mark.parametrize(
    "name",
    ["embedding.word_embeddings", "decoder.layers.1.self_attention.core_attention", "decoder.layers.0.mlp.experts"],
)
def test_a_failing_module_of_a_megatron_model(name: str, streams: str) -> None:
    """Stand-in parameters are taken out, the tracker's fork is closed, and the next run is right."""
    bench = Bench(by_name("mtp-tied-ep1").with_config(attention_dropout=0.1))
    schedule = schedules.serial(bench.chunk().shape, 3)
    right = bench.run(schedule)
    before = {key: id(p) for key, p in bench.model.named_parameters()}
    calls = 0

    def fail(module: Any, args: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 2:
            with get_cuda_rng_tracker().fork():
                raise ValueError("planted")

    handle = bench.model.get_submodule(name).register_forward_pre_hook(fail)
    bench.reset()
    states = set(get_cuda_rng_tracker().get_states())
    with pytest.raises(StepError, match="planted"):
        Runner(streams=streams).run(schedule, bench.chunk(), bench.batches(), bench.loss_grads())
    handle.remove()
    assert {key: id(p) for key, p in bench.model.named_parameters()} == before
    assert set(get_cuda_rng_tracker().get_states()) == states
    again = bench.run(schedule, streams=streams)
    assert all(
        right[key] is again[key] or torch.equal(right[key], again[key])  # type: ignore[arg-type]
        for key in right
    )


@pytest.mark.parametrize("streams", ["inline", "threads"])
def test_a_handoff_that_nobody_took(streams: str) -> None:
    """Found at the node that left it, with its name, and what to do; its gradient would be lost in silence."""

    class Forgetful(toy.Return):
        def forward(self, ctx: Any, *inputs: torch.Tensor) -> torch.Tensor:
            return inputs[0] * 1.5

    first, second = toy.toys(2)
    chunks = [toy.chunk_of([first]), toy.chunk_of([second], moe_combine=Forgetful)]
    chunk = ChunkPlan.of([plan for one in chunks for plan in one.layers])
    with Runner(streams) as runner, pytest.raises(StepError) as caught:
        runner.run(schedules.serial(chunk.shape, 1), chunk, toy.inputs(1))
    assert isinstance(caught.value.__cause__, NodeStateError)
    wanted = "Forgetful.forward returned with declared handoffs left untaken: wide; take and put each"
    assert str(caught.value.__cause__).startswith(wanted)
    assert caught.value.step == "F0.L1.moe_combine"
