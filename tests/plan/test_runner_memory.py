"""Memory: nothing of a run outlives it, nothing grows, and serial peaks no higher than the plain model.

``benchmarks._live`` says how bytes are counted.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import pytest
from torch import Tensor

from benchmarks._live import LiveBytes
from layernodes import ChunkPlan, Runner, schedules
from layernodes.lane import tensors_in
from layernodes.plan.program_cache import MAX_COMPILED
from tests.support import toy
from tests.support.configs import by_name
from tests.support.fixtures import MEGATRON_WORLD, megatron_world  # noqa: F401
from tests.support.full import FULL
from tests.support.live import live, without_collection
from tests.support.runs import Bench

pytestmark = MEGATRON_WORLD
_RUNS = 1000


@pytest.mark.parametrize("streams", ["inline", "threads"])
def test_a_thousand_runs_leave_nothing(streams: str) -> None:
    """The number and bytes of live tensors do not grow over 1,000 runs, with no collection of cycles."""
    layers, batches = toy.toys(1), toy.inputs(2)
    chunk = toy.chunk_of(layers)
    schedule = schedules.forward_forward(chunk.shape, 2)
    with Runner(streams=streams) as runner, without_collection():
        for _ in range(3):
            runner.run(schedule, chunk, batches)
        before = live()
        for _ in range(_RUNS):
            runner.run(schedule, chunk, batches)
        assert live() == before


def test_new_schedules_do_not_pile_up() -> None:
    """A runner given a new schedule every time keeps a few of them only."""
    chunk, batches = toy.chunk_of(toy.toys(1)), toy.inputs(1)
    with Runner(streams="inline") as runner, without_collection():
        for _ in range(MAX_COMPILED + 8):
            runner.run(schedules.serial(chunk.shape, 1), chunk, batches)
        before = live()
        for _ in range(MAX_COMPILED + 8):
            runner.run(schedules.serial(chunk.shape, 1), chunk, batches)
        assert live() == before


@pytest.mark.parametrize("streams", ["inline", "threads"])
@pytest.mark.parametrize("name", ["alltoall-shared-ep1", "mtp-tied-ep1", "recompute-all-ep1", "allgather-aux-ep1"])
def test_megatron_runs_leave_nothing(name: str, streams: str) -> None:
    """The same for Megatron-Core models, over fewer runs; nothing is left alive but the results."""
    bench = Bench(by_name(name))
    chunk = bench.chunk()
    schedule = schedules.combined_1f1b(chunk.shape, 3)
    with Runner(streams=streams) as runner, without_collection():
        for _ in range(2):
            runner.run(schedule, chunk, bench.batches(), bench.loss_grads())
        before = live()
        for _ in range(100 if FULL else 10):
            runner.run(schedule, chunk, bench.batches(), bench.loss_grads())
        assert live() == before


def test_no_tensor_of_a_run_outlives_it() -> None:
    """Weak references to every tensor that the modules made are dead when ``run`` returns, results aside."""
    bench = Bench(by_name("alltoall-shared-ep1"))
    chunk = bench.chunk()
    made: list[weakref.ref[Tensor]] = []

    def note(_: Any, args: Any, output: Any) -> None:
        made.extend(weakref.ref(t) for t in tensors_in(output))

    for name, module in bench.model.named_modules():
        if "rotary" not in name:  # Megatron-Core caches rotary embeddings by length
            module.register_forward_hook(note)
    chunk = ChunkPlan.build(bench.model)
    with without_collection():
        for streams in ("inline", "threads"):
            with Runner(streams=streams) as runner:
                result = runner.run(
                    schedules.forward_forward(chunk.shape, 3), chunk, bench.batches(), bench.loss_grads()
                )
            alive = [ref() for ref in made if ref() is not None]
            assert len(made) > 50
            assert not alive, f"{len(alive)} of {len(made)}"
            assert len(result.outputs) == 3
            made.clear()


def _peak_of_plain(bench: Bench) -> int:
    """Microbatch after microbatch, gradients adding up, outputs kept without their graphs as a runner keeps them."""
    bench.reset()
    outputs = []
    with LiveBytes() as counter:
        for microbatch in bench.microbatches:
            output = bench.model(**microbatch.inputs)
            output.backward(microbatch.output_grad.to(output.dtype))
            outputs.append(output.detach())
            del output
    return counter.peak


def _peak_of_serial(bench: Bench) -> int:
    """The same microbatches in one run."""
    bench.reset()
    batches, loss_grads = bench.batches(), bench.loss_grads()
    schedule = schedules.serial(bench.chunk().shape, len(batches))
    with Runner(streams="inline") as runner, LiveBytes() as counter:
        runner.run(schedule, bench.chunk(), batches, loss_grads)
    return counter.peak


def _bytes_of_layers(bench: Bench) -> list[int]:
    """What each decoder layer of the plain model leaves alive for its backward: measured around its forward."""
    bench.reset()
    found: list[int] = []
    with LiveBytes() as counter:
        for layer in bench.model.decoder.layers:
            layer.register_forward_pre_hook(lambda *_: found.append(-counter.now()))
            layer.register_forward_hook(lambda *_: found.append(found.pop() + counter.now()))
        output = bench.model(**bench.microbatches[0].inputs)
    assert output.requires_grad
    for layer in bench.model.decoder.layers:
        layer._forward_pre_hooks.clear()
        layer._forward_hooks.clear()
    return found


@pytest.mark.parametrize("name", ["four-layers-ep1", "dense", "alltoall-shared-ep1", "mixed-ep1", "recompute-all-ep1"])
def test_serial_peaks_no_higher_than_plain_by_more_than_a_layer(name: str) -> None:
    """Peak live activation bytes of one run of the serial schedule against the plain model's."""
    bench = Bench(by_name(name))
    plain, ours, layers = _peak_of_plain(bench), _peak_of_serial(bench), _bytes_of_layers(bench)
    assert len(layers) == len(bench.cell.layers)
    assert all(0 < of_layer < plain for of_layer in layers)
    assert ours <= plain + max(layers), (plain, ours, layers)


def sizes(names: Sequence[str]) -> dict[str, tuple[int, int, list[int]]]:
    """Peak bytes of the plain model and of the serial schedule, and those of layers, for those who want the numbers."""
    benches = {name: Bench(by_name(name)) for name in names}
    return {
        name: (_peak_of_plain(bench), _peak_of_serial(bench), _bytes_of_layers(bench))
        for name, bench in benches.items()
    }
