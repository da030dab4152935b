"""Megatron-Core's DDP where some microbatches defer their weight gradients and others do not."""

from __future__ import annotations

import threading
from collections import Counter
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

from layernodes import ChunkPlan, schedules
from tests.support.build import make_microbatches, make_model
from tests.support.configs import Cell, by_name
from tests.support.fixtures import MEGATRON_WORLD, megatron_world  # noqa: F401
from tests.support.wgrads import run

pytestmark = MEGATRON_WORLD

_MIXES = (("auto", "off", "auto"), ("off", "auto", "off"), ("plain", "auto", "plain"), ("auto", "plain", "off"))


def _wrap(cell: Cell) -> Any:
    model = make_model(cell)
    config = DistributedDataParallelConfig(overlap_grad_reduce=True, bucket_size=2000)
    return DistributedDataParallel(model.config, config, model)


def _deferred(chunk: ChunkPlan) -> set[int]:
    return {
        id(parameter)
        for plan in chunk.layers
        for node in plan.describe().nodes
        for name, parameter in plan.layer.named_parameters()
        if name in node.wgrad
    }


@pytest.mark.parametrize("mix", _MIXES, ids=" ".join)
@pytest.mark.parametrize("name", ["dense", "alltoall-mtp-ep1", "tied-ep1"])
def test_ready_once_and_reduced_at_the_last_microbatch(name: str, mix: tuple[str, ...]) -> None:
    """Main gradients as in the plain model; each parameter is ready once a microbatch, a deferred one in W; each bucket
    is reduced once, in the last microbatch, when all of its gradients are there."""
    cell = by_name(name)
    plain, model = _wrap(cell), _wrap(cell)
    microbatches = make_microbatches(cell)[: len(mix)]
    assert len(microbatches) == len(mix)
    chunks = {mode: ChunkPlan.build(model, wgrad=mode) for mode in ("auto", "off")}
    deferred = _deferred(chunks["auto"])
    now: list[tuple[int, str]] = []
    fired: Counter[str] = Counter()
    reduced: list[tuple[int, set[str]]] = []
    for key, parameter in model.module.named_parameters():

        def ready(p: Any, key: str = key) -> None:
            m, step = now[-1]
            phase = "W" if mix[m] == "auto" and id(p) in deferred else "B"
            assert step.startswith(phase), (key, now[-1])
            fired[key] += 1

        parameter.register_post_accumulate_grad_hook(ready)
    names = {id(p): key for key, p in model.module.named_parameters()}
    for group in (*model.bucket_groups, *model.expert_parallel_bucket_groups):

        def start(*args: Any, group: Any = group, own: Any = group.start_grad_sync, **options: Any) -> Any:
            whole = {names[id(p)] for bucket in group.buckets for p in bucket.params}
            for key in whole:  # the plain model has been through this microbatch already
                ours, theirs = (one.module.get_parameter(key).main_grad for one in (model, plain))
                assert torch.equal(ours, theirs), key
            reduced.append((now[-1][0], whole))
            return own(*args, **options)

        group.start_grad_sync = start
    for _turn in range(2):  # the first is where DDP learns how often each parameter is ready
        fired.clear()
        reduced.clear()
        for one in (plain, model):
            one.zero_grad_buffer()
        for m, microbatch in enumerate(microbatches):
            is_last = m == len(mix) - 1
            with nullcontext() if is_last else plain.no_sync():
                plain(**microbatch.inputs).backward(microbatch.output_grad)
            with nullcontext() if is_last else model.no_sync():
                if mix[m] == "plain":
                    now.append((m, "B"))
                    model(**microbatch.inputs).backward(microbatch.output_grad)
                    continue
                chunk = chunks[mix[m]]
                order = schedules.deferred(schedules.serial(chunk.shape, 1), chunk.shape, "end")
                run(
                    order,
                    chunk,
                    [dict(microbatch.inputs)],
                    loss_grads=[microbatch.output_grad],
                    before_step=lambda step, m=m: now.append((m, str(step))),
                )
        for one in (plain, model):
            one.finish_grad_sync()
        for key, parameter in model.module.named_parameters():
            assert torch.equal(parameter.main_grad, plain.module.get_parameter(key).main_grad), key
        assert set(fired.values()) == {len(mix)}
        assert {m for m, _ in reduced} <= {len(mix) - 1}
        assert sum(len(whole) for _, whole in reduced) == len(fired)


def test_a_parallel_linears_product_runs_on_the_thread_of_w() -> None:
    """Parked by one thread, drained by another: the gradients are there, delivered by the second."""
    cell = by_name("dense")
    plain, model = make_model(cell), make_model(cell)
    (microbatch,) = make_microbatches(cell)[:1]
    plain(**microbatch.inputs).backward(microbatch.output_grad)
    chunk = ChunkPlan.build(model, wgrad="auto")
    deferred = _deferred(chunk)
    threads: dict[bool, set[str]] = {True: set(), False: set()}
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(
            lambda p: threads[id(p) in deferred].add(threading.current_thread().name)
        )
    places = [index for index, place in enumerate(chunk.places) if place.node is not None]
    chunk_run = chunk.open(dict(microbatch.inputs))
    for index in places:
        chunk_run.forward(index)
    chunk_run.end_forward()
    chunk_run.begin_backward(microbatch.output_grad)
    for index in reversed(places):
        chunk_run.backward(index)
    chunk_run.end_backward()

    def drain() -> None:
        for index in places:
            if chunk.places[index].new_hook is not None:
                chunk_run.weight_gradients(index)

    thread = threading.Thread(target=drain, name="drains")
    thread.start()
    thread.join()
    chunk_run.close()
    assert threads == {True: {"drains"}, False: {threading.current_thread().name}}
    for name, parameter in plain.named_parameters():
        assert torch.equal(parameter.grad, model.get_parameter(name).grad), name
