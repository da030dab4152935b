"""The strategies for users: what is said to be valid is, what is said to be broken is, by the hand-written oracle."""

from __future__ import annotations

import random
import sys
from unittest import mock

import pytest
from hypothesis import find, given, settings
from hypothesis import strategies as st

import layernodes
from layernodes import ChunkShape, ScheduleError, StreamType, simulate, validate
from layernodes.testing import (
    chunk_shapes,
    cost_models,
    invalid_schedules,
    megatron_configs,
    random_schedule,
    valid_schedules,
)
from tests import oracle
from tests.support.strategies import plain

_SHAPES = chunk_shapes(max_layers=2)


@given(data=st.data(), shape=_SHAPES, count=st.integers(0, 3), mode=st.sampled_from(["train", "forward"]))
@settings(max_examples=60, deadline=None)
def test_valid_schedules_are_valid(data: st.DataObject, shape: ChunkShape, count: int, mode: str) -> None:
    schedule = data.draw(valid_schedules(shape, count, mode))
    assert oracle.faults([str(step) for step in schedule], plain(shape), count, mode) == []


@given(data=st.data(), shape=_SHAPES, count=st.integers(1, 3))
@settings(max_examples=60, deadline=None)
def test_invalid_schedules_are_not(data: st.DataObject, shape: ChunkShape, count: int) -> None:
    """The oracle finds a fault, and ``validate`` names the step by the rule that was broken."""
    broken = data.draw(invalid_schedules(shape, count))
    assert oracle.faults([str(step) for step in broken.schedule], plain(shape), count) != []
    with pytest.raises(ScheduleError) as caught:
        validate(broken.schedule, shape, num_microbatches=count)
    named = [(violation.rule, violation.step) for violation in caught.value.violations]
    assert (broken.rule, broken.step) in named


def test_orders_vary() -> None:
    """Interleaved forwards, backwards and weight gradients of different microbatches all occur."""
    shape = ChunkShape.of(["moe"], pre_process=False, post_process=False, wgrad=True)
    drawn = [[str(step) for step in random_schedule(shape, 2, random.Random(seed))] for seed in range(40)]
    assert len({tuple(steps) for steps in drawn}) == 40
    pairs = {(steps[i][:2], steps[i + 1][:2]) for steps in drawn for i in range(len(steps) - 1)}
    assert pairs >= {("F0", "F1"), ("F1", "F0"), ("B0", "F1"), ("B0", "B1"), ("B1", "W0"), ("W0", "B1"), ("W1", "W0")}
    assert random_schedule(shape, 2, random.Random(3)) == random_schedule(shape, 2, random.Random(3))


@given(data=st.data(), shape=_SHAPES)
@settings(max_examples=20, deadline=None)
def test_costs_price_every_step(data: st.DataObject, shape: ChunkShape) -> None:
    schedule = random_schedule(shape, 2, random.Random(0))
    assert simulate(schedule, data.draw(cost_models(shape)), shape).makespan >= 0


def test_shapes_and_configs_cover_the_field() -> None:
    """Each of the features can be drawn."""
    find(_SHAPES, lambda shape: any(slot.stream is StreamType.COMM for x in shape.layers for slot in x.slots if x.mtp))
    find(_SHAPES, lambda shape: any(slot.name == "gate" and slot.wgrad for x in shape.layers for slot in x.slots))
    find(megatron_configs(), lambda config: "moe_act" in config.get("recompute_modules", []))
    find(megatron_configs(moe=False), lambda config: bool(config.get("bf16")))
    assert find(megatron_configs(dropout=True), lambda _: True)["hidden_dropout"] == 0.1


def test_without_hypothesis_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("layernodes.testing")]:
        monkeypatch.delitem(sys.modules, name)
    with (
        mock.patch.dict(sys.modules, {"hypothesis": None}),
        pytest.raises(layernodes.MissingExtraError, match=r"pip install 'layernodes\[testing\]'") as caught,
    ):
        __import__("layernodes.testing")
    assert caught.value.extra == "testing"
