"""``HybridModel``: every valid schedule of every layer pattern gives the plain model's bits."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from hypothesis import event, given
from hypothesis import strategies as st
from megatron.core.transformer.module import Float16Module

from layernodes import ChunkPlan, schedules
from tests.support.cells import is_ordered
from tests.support.configs import Cell
from tests.support.deferred_runs import DeferredBench, random_deferred_schedule
from tests.support.fixtures import MEGATRON_WORLD, megatron_world  # noqa: F401
from tests.support.full import property_settings
from tests.support.hybrid_cells import FEATURES, TWO_RANKS, hybrid_cell, hybrid_cells
from tests.support.ranks import values_on_ranks
from tests.support.runs import Bench, check_example, random_schedule

pytestmark = MEGATRON_WORLD

_GROUPS = st.sampled_from([None, False, True])


@given(
    cell=hybrid_cells(),
    seed=st.integers(0, 2**32 - 1),
    streams=st.sampled_from(["inline", "threads", "recording"]),
    split_combine=st.booleans(),
    has_grads=st.booleans(),
    group=_GROUPS,
)
@property_settings(40)
def test_any_schedule_of_any_pattern(
    cell: Cell, seed: int, streams: str, split_combine: bool, has_grads: bool, group: bool | None
) -> None:
    """Outputs, input gradients, parameter gradients, buffers, trackers and generators are the oracle's, bit for bit."""
    event(f"{streams}, {cell.num_microbatches} microbatches, mtp={cell.mtp}, group={group}")
    options: Any = {"split_combine": split_combine, "has_grads": has_grads, "group": group}
    check_example(cell, seed=seed, streams=streams, **options)


@given(
    cell=hybrid_cells(), seed=st.integers(0, 2**32 - 1), streams=st.sampled_from(["inline", "threads"]), group=_GROUPS
)
@property_settings(15, in_full=250)
def test_w_at_random_legal_places(cell: Cell, seed: int, streams: str, group: bool | None) -> None:
    """Deferred weight gradients add in the order of their W."""
    bench = DeferredBench(cell, group=group)
    schedule = random_deferred_schedule(bench, seed)
    names = bench.check(schedule, streams=streams)
    assert not names, (names[:5], str(schedule))


@pytest.mark.parametrize("group", [False, True])
@pytest.mark.parametrize("name", FEATURES)
def test_feature(name: str, group: bool) -> None:
    """One feature each, under Megatron-Core's order and a random one."""
    bench = Bench(FEATURES[name], group=group)
    count = len(bench.microbatches)
    shape = bench.chunk().shape
    orders = [schedules.combined_1f1b(shape, count)]
    orders += [] if is_ordered(bench.cell) else [random_schedule(bench, 7)]
    for order in orders:
        assert bench.check(order, streams="threads") == []


@pytest.mark.parametrize("name", ["every-kind", "mtp-two-tied", "mla", "shared-latent", "tied"])
def test_deferral_leaves_little_with_b(name: str) -> None:
    """With ``wgrad="auto"`` every matrix comes with W, but the embedding, the output layer and the router's."""
    chunk = ChunkPlan.build(Bench(FEATURES[name]).model, wgrad="auto")
    for plan in chunk.layers:
        parameters = dict(plan.layer.named_parameters())
        late = {n for node in plan.describe().nodes for n in node.wgrad}
        early = {n for node in plan.describe().nodes for n in node.with_backward}
        assert late | early == set(parameters)
        assert [n for n in early if parameters[n].dim() > 1 and "router" not in n] == []


@pytest.mark.parametrize("pattern, explicit", [("M*EM-", "M*E M-"), ("M*EM-", "M * E M -"), ("-E*-", "-E *-")])
def test_explicit_groups(pattern: str, explicit: str) -> None:
    """A grouping in the words of the pattern."""
    bench = Bench(hybrid_cell(pattern), group=explicit)
    assert [layer.kind for layer in bench.chunk().shape.layers] == explicit.split()
    assert bench.check(random_schedule(bench, 3)) == []


def test_the_output_of_an_empty_part_is_not_its_input() -> None:
    """A pipeline frees what it sent on; the tensor that it received stays."""
    bench = Bench(FEATURES["empty-middle"])
    run = bench.run(schedules.serial(bench.chunk().shape, 3))
    hidden = bench.microbatches[0].hidden_states
    assert hidden is not None
    assert run["output/0"].data_ptr() != hidden.data_ptr()


def test_two_ranks() -> None:
    """Expert and tensor parallelism on two ranks, with random delays: plain bits."""
    found = values_on_ranks("tests.support.hybrid_ranks:equal_plain", TWO_RANKS, seconds=400)
    assert found == [{}, {}]


def test_float16_wrapper() -> None:
    """``Float16Module``: inputs in low precision, losses in fp32, as the wrapped model returns them."""
    bench = Bench(FEATURES["bf16"])
    wrapped = Float16Module(bench.model.config, bench.model)
    batch = bench.batches()[0]
    expected = wrapped(**batch)
    run = bench.run(schedules.serial(bench.chunk().shape, 3), chunk=ChunkPlan.build(wrapped), streams="inline")
    assert expected.dtype is torch.float32
    assert torch.equal(run["output/0"], expected)


def _num_tensors() -> int:
    gc.collect()
    return sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())


@pytest.mark.parametrize("name", ["every-kind", "mtp-two-tied", "mla", "recompute"])
def test_runs_leave_no_tensor(name: str) -> None:
    """After the first run, the number of live tensors does not grow."""
    bench = Bench(FEATURES[name])
    order = schedules.combined_1f1b(bench.chunk().shape, len(bench.microbatches))
    counts = []
    for _ in range(4):
        bench.run(order, streams="threads")
        counts.append(_num_tensors())
    assert counts[1] == counts[-1]
