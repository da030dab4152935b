"""Any valid schedule of any configuration gives the plain model's bits.

100 examples by default, 1,000 with ``LAYERNODES_FULL=1``; ``make soak`` runs 10,000
(``tests.support.soak``).
"""

from __future__ import annotations

import torch
from hypothesis import event, given
from hypothesis import strategies as st

from layernodes import schedules
from tests.support.cells import cells
from tests.support.configs import Cell
from tests.support.fixtures import MEGATRON_WORLD, megatron_world  # noqa: F401
from tests.support.full import property_settings
from tests.support.runs import Bench, check_example, random_schedule

pytestmark = MEGATRON_WORLD

_SETTINGS = property_settings(100)


@given(
    cell=cells(),
    seed=st.integers(0, 2**32 - 1),
    streams=st.sampled_from(["inline", "threads"]),
    split_combine=st.booleans(),
    has_grads=st.booleans(),
)
@_SETTINGS
def test_any_schedule_of_any_configuration(
    cell: Cell, seed: int, streams: str, split_combine: bool, has_grads: bool
) -> None:
    """Outputs, input gradients, parameter gradients, buffers, trackers and generators are the oracle's, bit for bit."""
    event(f"{streams}, {cell.num_microbatches} microbatches, mtp={cell.mtp}")
    check_example(cell, seed=seed, streams=streams, split_combine=split_combine, has_grads=has_grads)


@given(
    cell=cells(dropout=True, max_microbatches=3),
    seed=st.integers(0, 2**32 - 1),
    streams=st.sampled_from(["inline", "threads"]),
    split_combine=st.booleans(),
)
@property_settings(25, in_full=250)
def test_per_step_randomness_is_the_same_in_every_order(
    cell: Cell, seed: int, streams: str, split_combine: bool
) -> None:
    """With ``rng="per_step"`` outputs, input gradients and generators are those of the serial schedule in that mode."""
    bench = Bench(cell)
    serial = schedules.serial(bench.chunk(split_combine=split_combine).shape, cell.num_microbatches)
    expected = bench.run(serial, rng="per_step", split_combine=split_combine)
    schedule = random_schedule(bench, seed, split_combine=split_combine)
    actual = bench.run(schedule, rng="per_step", streams=streams, split_combine=split_combine)
    for name, value in expected.items():
        if name.startswith(("output/", "input_grad/", "rng/", "buffer/")):
            found = actual[name]
            assert value is found or (value is not None and found is not None and torch.equal(value, found)), name
    # Parameter gradients add in another order, so only those of one microbatch compare bit for bit.
    if cell.num_microbatches == 1:
        for name, value in expected.items():
            found = actual[name]
            assert value is found or (value is not None and found is not None and torch.equal(value, found)), name
