"""Built-in pairs; and Megatron-Core's own plan, run on fakes, as the judge of ``combined_1f1b``."""

from __future__ import annotations

import importlib
import warnings
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from layernodes.plan import pairs, schedules
from layernodes.plan.schedule import PairSchedule
from layernodes.plan.shape import ChunkShape
from layernodes.plan.validate import validate_pair
from layernodes.plan.wgrad import WgradPlace
from layernodes.slots import MEGATRON_SLOTS, Phase
from layernodes.testing import chunk_shapes


@settings(deadline=None)
@given(st.none() | chunk_shapes(), st.none() | chunk_shapes())
def test_valid_for_every_two_shapes(forward: ChunkShape | None, backward: ChunkShape | None) -> None:
    """Chunks of any two lengths, or one alone."""
    built = [build(forward, backward) for build in pairs.BUILT_IN.values()]
    built += [
        pairs.combined_1f1b(forward, backward, early_release=early, megatron_wgrad=own)
        for early in (False, True)
        for own in (False, True)
    ]
    for pair in built:
        validate_pair(pair, forward, backward)
        for place in WgradPlace:
            validate_pair(pairs.deferred(pair, forward, backward, place), forward, backward)


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("own", [False, True])
def test_same_definition_as_for_one_chunk(early: bool, own: bool) -> None:
    """The middle turn of combined_1f1b over one chunk is the pair of that chunk with itself."""
    shape = ChunkShape.of(["moe", "dense"], mtp=1, wgrad=True)
    schedule = schedules.combined_1f1b(shape, 2, early_release=early, megatron_wgrad=own)
    pair = pairs.combined_1f1b(shape, shape, early_release=early, megatron_wgrad=own)
    alone = len(schedules.forward_only(shape, 1))
    swapped = str(schedule[alone : alone + len(pair)])
    for old, new in (("F1.", "F_."), ("B0.", "B1."), ("W0.", "W1."), ("F_.", "F0.")):
        swapped = swapped.replace(old, new)
    assert swapped == str(pair)


@pytest.fixture(scope="module")
def megatron() -> ModuleType:
    """Megatron-Core's scheduler; its import warns where Transformer Engine is missing."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return importlib.import_module("megatron.core.models.common.model_chunk_schedule_plan")


class FakeChunk:
    """Stands for a chunk's plan in Megatron-Core's scheduler and notes what is called."""

    vp_stage = None

    def __init__(self, shape: ChunkShape, microbatch: int, log: list[str], *, early: bool) -> None:
        self._layers = [_fake_layer(shape, number, microbatch, log, early=early) for number in range(shape.num_layers)]
        self.pre_process = _fake_node(log, microbatch, "pre_process") if shape.pre_process else None
        self.post_process = _fake_node(log, microbatch, "post_process") if shape.post_process else None

    def num_layers(self) -> int:
        return len(self._layers)

    def get_layer(self, number: int) -> Any:
        return self._layers[number]

    def pop_layer(self) -> Any:
        return self._layers.pop()

    def record_current_stream(self) -> None: ...
    def wait_current_stream(self) -> None: ...
    def release_state(self) -> None: ...


def _fake_node(log: list[str], microbatch: int, name: str) -> Any:
    def note(phase: Phase) -> Any:
        return lambda *args: log.append(f"{phase}{microbatch}.{name}")

    return SimpleNamespace(forward=note(Phase.F), backward=note(Phase.B), backward_dw=note(Phase.W))


def _fake_layer(shape: ChunkShape, number: int, microbatch: int, log: list[str], *, early: bool) -> Any:
    class Context:
        def __enter__(self) -> None: ...
        def __exit__(self, *args: object) -> None: ...

    return SimpleNamespace(
        config=SimpleNamespace(ep_overlap_early_attn_memory_release=early),
        get_low_precision_context=Context,
        release_state=lambda: None,
        **{slot: _fake_node(log, microbatch, f"L{number}.{slot}") for slot in MEGATRON_SLOTS},
    )


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("forward", [None, [], ["moe"], ["moe", "dense", "moe"], ["moe"] * 5])
@pytest.mark.parametrize("backward", [None, [], ["dense"], ["moe", "moe"], ["dense", "moe", "moe", "moe"]])
@pytest.mark.parametrize("ends", [False, True])
def test_order_is_megatrons(
    megatron: ModuleType, forward: list[str] | None, backward: list[str] | None, early: bool, ends: bool
) -> None:
    """Megatron-Core's own ``run``, on chunks that only take notes, calls our steps in our order."""
    f_shape = None if forward is None else ChunkShape.of(forward, mtp=int(ends), post_process=ends, wgrad=True)
    b_shape = None if backward is None else ChunkShape.of(backward, mtp=int(ends), post_process=ends, wgrad=True)
    log: list[str] = []
    megatron.TransformerModelChunkSchedulePlan.run(
        None if f_shape is None else FakeChunk(f_shape, 0, log, early=early),
        None if b_shape is None else FakeChunk(b_shape, 1, log, early=early),
        b_grad=object(),
    )
    pair = pairs.combined_1f1b(f_shape, b_shape, early_release=early, megatron_wgrad=True)
    real = set(pair)
    assert [step for step in PairSchedule.parse(" ".join(log)) if step in real] == list(pair)
