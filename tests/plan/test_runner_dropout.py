"""Dropout over real layers of several slots: where random numbers come from in each mode (case 6)."""

from __future__ import annotations

from itertools import chain

import pytest
import torch
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker, initialize_rng_tracker

from layernodes import ChunkPlan, Runner, Schedule, Step, schedules
from layernodes._megatron.rng import Generators
from layernodes.plan.generators import backward_steps, forward_steps
from layernodes.plan.shape import ChunkShape
from tests.support.compare import Snapshot
from tests.support.configs import Cell, by_name
from tests.support.fixtures import MEGATRON_WORLD, megatron_world  # noqa: F401
from tests.support.ranks import values_on_ranks
from tests.support.runs import Bench

pytestmark = MEGATRON_WORLD
STREAMS = ["inline", "threads", "recording"]

_TINY = Cell(
    name="tiny",
    layers="MM",
    local_experts=4,
    seq=6,
    batch=1,
    vocab=11,
    num_microbatches=2,
    config={
        "hidden_size": 8,
        "num_attention_heads": 2,
        "moe_router_topk": 2,
        "moe_shared_expert_intermediate_size": 16,
        "hidden_dropout": 0.5,
        "attention_dropout": 0.5,
        "params_dtype": "float64",
    },
    late_config={"moe_ffn_hidden_size": 16},
)


@pytest.fixture(scope="module")
def bench(megatron_world: None) -> Bench:  # noqa: F811
    """The tiny model of the cases, with dropout of a half."""
    return Bench(_TINY)


def _order(shape: ChunkShape, text: str) -> Schedule:
    """``F0F1B1B0``: whole passes, one after the other."""
    passes = {"F": forward_steps, "B": backward_steps}
    return Schedule(chain.from_iterable(passes[text[i]](shape, int(text[i + 1])) for i in range(0, len(text), 2)))


def _slot_by_slot(shape: ChunkShape) -> Schedule:
    """Two forwards that take turns after every slot, then the backwards, in ascending order."""
    forwards = zip(forward_steps(shape, 0), forward_steps(shape, 1), strict=True)
    steps: list[Step] = [step for pair in forwards for step in pair]
    return Schedule([*steps, *backward_steps(shape, 0), *backward_steps(shape, 1)])


def _differing(expected: Snapshot, actual: Snapshot) -> list[str]:
    assert set(expected) == set(actual)
    pairs = {name: (value, actual[name]) for name, value in expected.items()}
    return [n for n, (a, b) in pairs.items() if not (a is b or (a is not None and b is not None and torch.equal(a, b)))]


@pytest.mark.parametrize("streams", STREAMS)
@pytest.mark.parametrize("order", ["F0B0F1B1", "F0F1B1B0"])
def test_plain_draws_what_the_plain_model_draws(bench: Bench, order: str, streams: str) -> None:
    """Outputs, gradients and the generators' final states; the oracle knows the order in which gradients add."""
    assert bench.check(_order(bench.chunk().shape, order), streams=streams) == []


def test_plain_follows_the_order_of_steps(bench: Bench) -> None:
    """Slot by slot the two forwards draw each other's numbers: what makes the next test mean something."""
    names = bench.check(_slot_by_slot(bench.chunk().shape), streams="inline")
    assert "output/0" in names
    assert "rng/default" not in names  # as many numbers, all the same


@pytest.mark.parametrize("streams", STREAMS)
def test_per_step_is_the_same_slot_by_slot(bench: Bench, streams: str) -> None:
    """Everything, the generators' final states included, is what the serial schedule gives in that mode."""
    shape = bench.chunk().shape
    serial = bench.run(_order(shape, "F0B0F1B1"), rng="per_step")
    assert _differing(serial, bench.run(_slot_by_slot(shape), rng="per_step", streams=streams)) == []
    backward = bench.run(_order(shape, "F0F1B1B0"), rng="per_step", streams=streams)
    # Of two microbatches gradients add to the same sum in either order.
    assert _differing(serial, backward) == []


def test_a_plan_built_in_evaluation_trains_alike(bench: Bench) -> None:
    """What draws random numbers does so in the schedule's order, whatever mode the model was in when it was planned."""
    bench.model.eval()
    try:
        chunk = ChunkPlan.build(bench.model)
    finally:
        bench.model.train()
    serial = bench.run(_order(chunk.shape, "F0B0F1B1"), rng="per_step")
    assert _differing(serial, bench.run(_slot_by_slot(chunk.shape), rng="per_step", chunk=chunk)) == []


def test_per_step_draws_anew_for_each_microbatch_and_run(bench: Bench) -> None:
    """Two microbatches with the same tokens differ, and so do two runs one after the other."""
    shape = bench.chunk().shape
    bench.reset()
    batches = [bench.batches()[0], bench.batches()[0]]
    schedule = schedules.serial(shape, 2)
    with Runner(streams="inline", rng="per_step") as runner:
        first = runner.run(schedule, bench.chunk(), batches, [bench.loss_grads()[0]] * 2)
        second = runner.run(schedule, bench.chunk(), batches, [bench.loss_grads()[0]] * 2)
    outputs = [*first.outputs, *second.outputs]
    assert not any(torch.equal(a, b) for i, a in enumerate(outputs) for b in outputs[:i])


def test_generators_that_graphs_know_stay(bench: Bench) -> None:
    """The tracker of CUDA graphs holds generators, and a device takes nothing else; seeded and put back, they still are
    those."""
    initialize_rng_tracker(use_cudagraphable_rng=True, force_reset=True)
    tracker = get_cuda_rng_tracker()
    try:
        tracker.add("own", 7)
        before = tracker.get_states()["own"]
        start = before.get_state()
        generators = Generators()
        states = generators.states()
        generators.seed(lambda name: len(name))
        assert tracker.get_states()["own"] is before
        assert not torch.equal(before.get_state(), start)
        generators.restore(states)
        assert tracker.get_states()["own"] is before
        assert torch.equal(before.get_state(), start)
    finally:
        bench.reset()


_RANKS = {
    "expert parallel": (by_name("alltoall-dropout-ep2"), {True}),
    "tensor parallel": (by_name("tp2-dense-dropout").with_config(sequence_parallel=False), {True, False}),
    "sequence parallel": (by_name("tp2-dense-dropout"), {False}),
}
"""Cells of two ranks, and whether there are draws that the ranks have alike (True) and apart (False)."""


def test_ranks_differ_where_they_differ_plainly() -> None:
    """Each draw of dropout is equal on two ranks in mode per_step exactly where it is in the plain model."""
    cells = {name: cell for name, (cell, _) in _RANKS.items()}
    first, second = values_on_ranks("tests.support.rank_cases:dropout_draws", cells)
    for name, (_, kinds) in _RANKS.items():
        one, other = first[name], second[name]
        alike = {case: [a == b for a, b in zip(one[case], other[case], strict=True)] for case in one["draws"]}
        assert set(alike["model"]) == kinds, name
        assert alike["plain"] == alike["per_step"] == alike["model"], name
        for seen in (one, other):
            assert seen["plain"] == seen["model"], name
            assert sorted(seen["interleaved"]) == sorted(seen["per_step"]), name
            assert len(set(seen["per_step"])) > len(seen["per_step"]) // 2, name
            assert seen["not plain"] == seen["not serial"] == [], name
