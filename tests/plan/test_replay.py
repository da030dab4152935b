"""What really ran, replayed: the measured order of a run is a valid schedule, and the simulator keeps it."""

from __future__ import annotations

import random
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from layernodes.plan import schedules
from layernodes.plan.chunk_plan import ChunkPlan
from layernodes.plan.measured import costs_of_timelines
from layernodes.plan.runner import Runner
from layernodes.plan.schedule import Schedule
from layernodes.plan.shape import ChunkShape
from layernodes.plan.simulate import simulate
from layernodes.plan.step import Step
from layernodes.plan.timeline import Timeline
from layernodes.plan.validate import validate
from layernodes.slots import StreamType
from tests import oracle
from tests.support.configs import by_name
from tests.support.fixtures import MEGATRON_WORLD, megatron_world  # noqa: F401
from tests.support.full import property_settings
from tests.support.runs import Bench
from tests.support.strategies import plain, valid_schedules
from tests.support.toy import chunk_of, inputs, toys

pytestmark = MEGATRON_WORLD

CHUNKS = {wgrad: ChunkPlan.of(chunk_of(toys(2)).layers, wgrad=wgrad) for wgrad in ("off", "auto")}


def check_replay(timeline: Timeline, shape: ChunkShape, num_microbatches: int) -> None:
    """The steps by the time at which they began are a valid schedule, and simulated they keep each stream's order."""
    began = sorted(timeline.intervals, key=lambda i: i.start)
    measured = Schedule(i.step for i in began)
    assert not oracle.faults([str(step) for step in measured], plain(shape), num_microbatches)
    validate(measured, shape, num_microbatches=num_microbatches)
    for later in began:
        for earlier in began:
            if oracle.must_precede(str(earlier.step), str(later.step), plain(shape)):
                assert earlier.end <= later.start
    replayed = simulate(measured, costs_of_timelines([timeline], shape), shape)
    for stream in StreamType:
        assert [i.step for i in replayed.on(stream)] == [i.step for i in began if i.stream is stream]


@pytest.mark.parametrize("streams", ["threads", "inline"])
@pytest.mark.parametrize("wgrad", CHUNKS)
def test_random_schedules(streams: str, wgrad: str) -> None:
    """Any valid schedule of toy layers, with random delays of its steps."""
    chunk = CHUNKS[wgrad]

    @property_settings(6, in_full=200)
    @given(valid_schedules(chunk.shape, 2), st.integers(0, 2**32 - 1))
    def check(schedule: Schedule, seed: int) -> None:
        delay = random.Random(seed)

        def wait(_: Step) -> None:
            if delay.random() < 0.3:
                time.sleep(1e-3 * delay.random())

        with Runner(streams, before_step=wait) as runner:
            check_replay(runner.run(schedule, chunk, inputs(2)).timeline, chunk.shape, 2)

    check()


def test_a_real_model() -> None:
    """A Megatron-Core model on threads."""
    bench = Bench(by_name("alltoall-mtp-ep1"))
    bench.reset()
    chunk = bench.chunk(split_combine=True)
    count = len(bench.microbatches)
    with Runner("threads") as runner:
        result = runner.run(schedules.combined_1f1b(chunk.shape, count), chunk, bench.batches(), bench.loss_grads())
    check_replay(result.timeline, chunk.shape, count)
