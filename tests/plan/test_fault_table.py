"""A fault at every kind of step of a real model, on all streams: one error, and nothing stays behind (case 15)."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Iterator

import pytest
import torch

from layernodes import ChunkPlan, Phase, Runner, Schedule, Step, StepError, schedules
from layernodes.plan.rules import Rules
from tests.support.faults import FaultBench, Planted
from tests.support.fixtures import MEGATRON_WORLD, megatron_world  # noqa: F401
from tests.support.live import live, without_collection

pytestmark = MEGATRON_WORLD

_UNSPLIT = (
    *("F1.pre_process", "F1.L0.pre_dispatch_computation", "F1.L0.mlp", "F1.L0.own"),
    *("F1.L1.pre_dispatch_computation", "F1.L1.moe_dispatch", "F1.L1.mlp", "F1.L1.own", "F1.L1.moe_combine"),
    *("F1.L2.pre_dispatch_computation", "F1.L2.mtp_post_process", "F1.post_process"),
    *("B1.post_process", "B1.L2.mtp_post_process", "B1.L2.pre_dispatch_computation"),
    *("B1.L1.moe_combine", "B1.L1.own", "B1.L1.mlp", "B1.L1.moe_dispatch", "B1.L1.pre_dispatch_computation"),
    *("B1.L0.own", "B1.L0.mlp", "B1.L0.pre_dispatch_computation", "B1.pre_process"),
    *("W1.L2.pre_dispatch_computation", "W1.L1.moe_combine", "W1.L1.mlp", "W1.L1.pre_dispatch_computation"),
    *("W1.L0.mlp", "W1.L0.pre_dispatch_computation"),
)
_SPLIT = ("F1.L1.moe_combine", "F1.L1.post_combine", "B1.L1.post_combine", "B1.L1.moe_combine", "W1.L1.post_combine")
_TABLE = [(text, False) for text in _UNSPLIT] + [(text, True) for text in _SPLIT]


@pytest.fixture(scope="module")
def bench(megatron_world: None) -> Iterator[FaultBench]:  # noqa: F811
    """The model, built once, as every case leaves it as it was; right while no fault is planted."""
    bench = FaultBench()
    for split_combine in (False, True):
        schedule = _schedule(bench.chunk(split_combine=split_combine))
        assert bench.check(schedule, split_combine=split_combine) == []
    gc.collect()
    gc.freeze()  # what is there already need not be looked at in every case
    yield bench
    gc.unfreeze()


@pytest.fixture(autouse=True)
def no_thread_left() -> Iterator[None]:
    """No thread outlives a test by more than it takes to end."""
    yield
    _wait_for_threads()


def _wait_for_threads() -> None:
    deadline = time.monotonic() + 2
    while any(t.name.startswith("layernodes") for t in threading.enumerate()):
        assert time.monotonic() < deadline, threading.enumerate()
        time.sleep(0.002)


def _schedule(chunk: ChunkPlan) -> Schedule:
    return schedules.deferred(schedules.combined_1f1b(chunk.shape, 2), chunk.shape, "next_comm")


def test_no_kind_of_step_is_left_out(bench: FaultBench) -> None:
    """The table has every phase of every slot that the two chunks have steps of, and weight gradients on both lanes."""
    for split_combine in (False, True):
        shape = bench.chunk(split_combine=split_combine).shape
        kinds = {(step.phase, step.slot) for step in _schedule(bench.chunk(split_combine=split_combine))}
        assert kinds <= {(Step.parse(text).phase, Step.parse(text).slot) for text, _ in _TABLE}
        rules = Rules.of(shape, 2)
        lanes = {rules.streams[rules.ids[Step.parse(text)]] for text, split in _TABLE if split is split_combine}
        assert len(lanes) == 2
    rules = Rules.of(bench.chunk().shape, 2)
    assert len({rules.streams[rules.ids[Step.parse(text)]] for text in _UNSPLIT if text[0] == Phase.W}) == 2


@pytest.mark.parametrize("streams", ["inline", "threads", "recording"])
@pytest.mark.parametrize(("text", "split_combine"), _TABLE)
def test_a_fault(bench: FaultBench, text: str, split_combine: bool, streams: str) -> None:
    """One StepError with step, layer, microbatch and what had completed, within a second; no tensor is left; and the
    next run has the plain bits."""
    chunk = bench.chunk(split_combine=split_combine)
    schedule = _schedule(chunk)
    step = Step.parse(text)
    parameters = {name: id(parameter) for name, parameter in bench.model.named_parameters()}
    batches, loss_grads = bench.batches(), bench.loss_grads()
    bench.fuse.raised_at.clear()
    with without_collection():
        bench.reset()
        before = live()
        with Runner(streams=streams, before_step=bench.fuse.begin) as runner:
            bench.fuse.armed = text
            try:
                with pytest.raises(StepError) as caught:
                    runner.run(schedule, chunk, batches, loss_grads)
            finally:
                bench.fuse.armed = None
        assert time.monotonic() - bench.fuse.raised_at[0] < 1
        assert len(bench.fuse.raised_at) == 1
        error = caught.value
        assert (error.step, error.layer, error.microbatch) == (text, step.layer, 1)
        assert isinstance(error.__cause__, Planted)
        _check_completed(error.completed, schedule, chunk, text, is_in_order=streams != "threads")
        del caught, error
        _wait_for_threads()
        bench.reset()
        # Torch's engine keeps what was left to do in a failed backward until the thread's next one.
        torch.ones(1, requires_grad=True).sum().backward()
        assert live() == before
    assert {name: id(parameter) for name, parameter in bench.model.named_parameters()} == parameters
    assert bench.check(schedule, split_combine=split_combine, streams=streams) == []


def _check_completed(
    completed: tuple[str, ...], schedule: Schedule, chunk: ChunkPlan, failed: str, *, is_in_order: bool
) -> None:
    """Each once, none that needs the failed step, on each lane a beginning of the schedule."""
    texts = [str(step) for step in schedule]
    if is_in_order:
        assert list(completed) == texts[: texts.index(failed)]
    assert len(set(completed)) == len(completed)
    rules = Rules.of(chunk.shape, 2)
    for stream in set(rules.streams):
        lane = [str(step) for step in schedule if rules.streams[rules.ids[step]] is stream]
        done = [text for text in completed if text in lane]
        assert done == lane[: len(done)]
        assert failed not in done
        if failed in lane:
            assert len(done) == lane.index(failed)
