"""Arguments of another type than wanted: what was found, what was wanted, where to get one; never a raw error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import layernodes
from layernodes import (
    ArgumentError,
    ChunkPlan,
    ChunkShape,
    CostModel,
    LayerNodesError,
    LayerPlan,
    PairSchedule,
    Runner,
    Schedule,
    Slot,
    Timeline,
    pairs,
    schedules,
)

_SHAPE = ChunkShape.of(["moe"])
_SCHEDULE = schedules.serial(_SHAPE, 1)
_COSTS = CostModel.simple(computation=1.0, communication=1.0)
_WRONG: list[Any] = [None, 3, object(), [1], {}, torch.nn.Linear(2, 2), Schedule, "nothing"]

_CALLS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "LayerPlan.build": (LayerPlan.build, ""),
    "LayerPlan.build, nodes": (lambda value: LayerPlan.build(torch.nn.Linear(2, 2), nodes=value), ""),
    "LayerPlan.build, registry": (lambda value: LayerPlan.build(torch.nn.Linear(2, 2), registry=value), ""),
    "ChunkPlan.build, registry": (lambda value: ChunkPlan.build(torch.nn.Linear(2, 2), registry=value), ""),
    "megatron.schedule, registry": (lambda value: layernodes.megatron.schedule([], registry=value or 0), "registry"),
    "megatron.schedule, hooks": (lambda value: layernodes.megatron.schedule([], layer_hooks=value or 0), "layer_hooks"),
    "megatron.schedule, streams": (lambda value: layernodes.megatron.schedule([], streams=value), ""),
    "Runner, hooks": (lambda value: Runner("inline", layer_hooks=value or 0), "layer_hooks"),
    "LayerRegistry.register": (lambda value: layernodes.LayerRegistry().register(value, {}), ""),
    "LayerRegistry.register, nodes": (lambda value: layernodes.LayerRegistry().register(torch.nn.Linear, value), ""),
    "LayerPlan.join": (LayerPlan.join, ""),
    "ChunkPlan.build": (ChunkPlan.build, ""),
    "ChunkPlan.of": (ChunkPlan.of, "{}"),
    "Runner": (Runner, ""),
    "run": (lambda value: Runner("inline").run(value, ChunkPlan.of([]), []), "schedule"),
    "run, chunk": (lambda value: Runner("inline").run(_SCHEDULE, value, [1]), "chunk"),
    "run, batches": (lambda value: Runner("inline").run(Schedule(), ChunkPlan.of([]), value), ""),
    "run, loss_grads": (lambda value: Runner("inline").run(Schedule(), ChunkPlan.of([]), [], value), ""),
    "run_pair": (lambda value: Runner("inline").run_pair(value, None, None), "schedule"),
    "validate": (lambda value: layernodes.validate(value, _SHAPE), "schedule"),
    "validate, shape": (lambda value: layernodes.validate(_SCHEDULE, value), "shape"),
    "validate_pair": (lambda value: layernodes.validate_pair(value, _SHAPE, _SHAPE), "schedule"),
    "simulate": (lambda value: layernodes.simulate(value, _COSTS), "schedule"),
    "simulate, costs": (lambda value: layernodes.simulate(_SCHEDULE, value), "costs"),
    "optimize": (lambda value: layernodes.optimize(value, _COSTS), "shape"),
    "optimize, costs": (lambda value: layernodes.optimize(_SHAPE, value), "costs"),
    "profile": (lambda value: layernodes.profile(value, None), "chunk"),
    "explain": (layernodes.explain, "timeline"),
    "megatron.schedule": (lambda value: layernodes.megatron.schedule(value).__enter__(), ""),
    "forward_steps": (lambda value: list(layernodes.forward_steps(value, 0)), "shape"),
    "backward_steps": (lambda value: list(layernodes.backward_steps(value, 0)), "shape"),
    "interleave": (lambda value: list(layernodes.interleave([value])), "what interleave takes from a sequence"),
    "ExtraSlot, stream": (lambda value: layernodes.ExtraSlot("x", after=Slot.MLP, stream=value), ""),
    "serial": (lambda value: schedules.serial(value, 1), "shape"),
    "combined_1f1b": (lambda value: schedules.combined_1f1b(value, 1), "shape"),
    "deferred": (lambda value: schedules.deferred(value, _SHAPE), "schedule"),
    "pairs.deferred": (lambda value: pairs.deferred(value, _SHAPE, _SHAPE), "schedule"),
    "Schedule.parse": (Schedule.parse, ""),
    "Schedule.from_json": (Schedule.from_json, ""),
    "Schedule.load": (Schedule.load, ""),
    "PairSchedule.parse": (PairSchedule.parse, ""),
    "Timeline.from_perfetto": (Timeline.from_perfetto, ""),
    "CostModel.load": (CostModel.load, ""),
}


@pytest.mark.parametrize("call", _CALLS)
@pytest.mark.parametrize("value", _WRONG, ids=lambda value: str(value)[:12])
def test_wrong_arguments_are_typed_errors(call: str, value: Any) -> None:
    """Whatever is given in place of the first argument; a text may also name a file that is not there."""
    function, name = _CALLS[call]
    if (value is None and call in ("LayerPlan.build, nodes", "run, loss_grads")) or (value == {} and name == "{}"):
        return
    with pytest.raises((LayerNodesError, FileNotFoundError)) as caught:
        function(value)
    if name not in ("", "{}"):
        assert isinstance(caught.value, ArgumentError)
        assert str(caught.value).startswith(f"{name} is ")


def test_the_text_says_what_to_do() -> None:
    """Found, wanted, and where to get one."""
    with pytest.raises(ArgumentError) as caught:
        layernodes.validate([1], _SHAPE)  # type: ignore[arg-type]
    assert str(caught.value).startswith("schedule is of type list, where Schedule is wanted; take a built-in of ")
    with pytest.raises(ArgumentError, match="shape is 'moe', where ChunkShape is wanted; take chunk.shape, or ChunkSh"):
        schedules.serial("moe", 2)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="costs is the class CostModel, where CostModel is wanted; take"):
        layernodes.simulate(_SCHEDULE, CostModel)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="num_microbatches is '2', where int is wanted; give a whole number"):
        schedules.serial(_SHAPE, "2")  # type: ignore[arg-type]
