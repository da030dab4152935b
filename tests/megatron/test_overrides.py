"""Methods of a user's own that the split path does not call: refused, on the class or on the object; others pass."""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

import pytest
import torch
from megatron.core.models.gpt import GPTModel

import layernodes
from layernodes import ChunkPlan, LayerPlan, Runner, UnsupportedLayerError, schedules
from layernodes._megatron.constraints import training_violations
from tests.support.build import make_microbatches, make_model
from tests.support.configs import Cell
from tests.support.fixtures import MEGATRON_WORLD, megatron_world  # noqa: F401
from tests.support.hybrid_cells import hybrid_cell

pytestmark = MEGATRON_WORLD

_CELL = Cell(name="overrides", layers="MD", mtp=1, num_microbatches=1)
_Way = Callable[[Any, str], None]


def _in_a_subclass(module: Any, method: str) -> None:
    own = type(module)

    def twice(self: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(own, method)(self, *args, **kwargs) * 2

    module.__class__ = type("Own", (own,), {method: twice})


def _on_the_object(module: Any, method: str) -> None:
    own = getattr(module, method)
    setattr(module, method, lambda *args, **kwargs: own(*args, **kwargs) * 2)


_WAYS = [_in_a_subclass, _on_the_object]
_PLACES = {
    "": "forward",
    "decoder": "forward",
    "mtp": "forward",
    "mtp.layers.0": "forward",
    "mtp.layers.0 ": "_proj_and_transformer_layer",
    "mtp.layers.0.mtp_model_layer": "forward",
    "decoder.layers.0": "forward",
    "decoder.layers.0 ": "_forward_mlp",
    "decoder.layers.0.mlp": "forward",
    "decoder.layers.1": "forward",
}
"""Modules of the model and which of their methods the split path does the work of."""


@pytest.mark.parametrize("place", _PLACES)
@pytest.mark.parametrize("override", _WAYS)
def test_refused_everywhere(place: str, override: _Way) -> None:
    """By a chunk plan, under ``schedule()`` and under ``install()``, with one field."""
    model, (microbatch,) = make_model(_CELL), make_microbatches(_CELL)
    module, method = model.get_submodule(place.strip()), _PLACES[place]
    override(module, method)
    name = type(module).__name__
    wanted = rf"{name} overrides {method}\(\), which the split path does not call"
    with pytest.raises(UnsupportedLayerError, match=wanted) as planned:
        ChunkPlan.build(model)
    with layernodes.install(), pytest.raises(UnsupportedLayerError, match=wanted) as installed:
        model.build_schedule_plan(**microbatch.inputs)
    (violation,) = training_violations([model], delay_wgrad=False)
    assert violation.field == planned.value.field == installed.value.field == f"{name}.{method}"


@pytest.mark.parametrize("override", _WAYS)
def test_models_are_told_what_to_do_instead(override: _Way) -> None:
    """A method that is called, or a submodule; and all that is wrong with the configuration is told beside it."""
    model, hybrid = make_model(_CELL), make_model(hybrid_cell("*E"))
    override(model, "forward")
    override(hybrid, "forward")
    with pytest.raises(UnsupportedLayerError, match="override _preprocess or _postprocess instead, or put it into"):
        ChunkPlan.build(model)
    with pytest.raises(UnsupportedLayerError, match="would be lost; put it into a layer or another submodule"):
        ChunkPlan.build(hybrid)
    model.config.num_microbatches_with_partial_activation_checkpoints = 2
    fields = [violation.field for violation in training_violations([model], delay_wgrad=False)]
    assert fields == ["num_microbatches_with_partial_activation_checkpoints", f"{type(model).__name__}.forward"]


@pytest.mark.parametrize("override", _WAYS)
def test_a_schedule_plan_of_the_models_own(override: _Way) -> None:
    """``schedule()`` replaces it, so refuses it; under ``install()`` it is called, and may stand for ``forward``."""
    model, (microbatch,) = make_model(_CELL), make_microbatches(_CELL)
    own: list[Any] = []

    def build_schedule_plan(*args: Any, **kwargs: Any) -> Any:
        own.append(args)
        return GPTModel.build_schedule_plan(model, *args, **kwargs)

    override(model, "forward")
    model.build_schedule_plan = build_schedule_plan
    with layernodes.install():
        assert model.build_schedule_plan(**microbatch.inputs) is not None
    assert len(own) == 1
    del model.__dict__["build_schedule_plan"]
    model.__dict__.pop("forward", None)
    model.__class__ = GPTModel
    override(model, "build_schedule_plan")
    (violation,) = training_violations([model], delay_wgrad=False)
    assert violation.field == f"{type(model).__name__}.build_schedule_plan"


def _compile_in_place(model: Any) -> None:
    model.compile(backend="eager")


def _compile_forward(model: Any) -> None:
    model.forward = torch.compile(model.forward, backend="eager")


def _bind_forward(model: Any) -> None:
    model.forward = MethodType(GPTModel.forward, model)


def _derive(model: Any) -> None:
    model.__class__ = type("Derived", (type(model),), {"extra": lambda self: None})


@pytest.mark.parametrize("change", [_compile_in_place, _compile_forward, _bind_forward, _derive])
def test_what_adds_nothing_passes(change: Callable[[Any], None]) -> None:
    """Compiled methods, a module's own method put back on it, subclasses without it: of models, blocks and layers."""
    model, (microbatch,) = make_model(_CELL), make_microbatches(_CELL)
    expected = model(**microbatch.inputs)
    change(model)
    if change is not _bind_forward:
        for name in ("decoder", "mtp", "mtp.layers.0", "decoder.layers.0", "decoder.layers.0.mlp", "decoder.layers.1"):
            change(model.get_submodule(name))
    assert training_violations([model], delay_wgrad=False) == ()
    with layernodes.install():
        assert model.build_schedule_plan(**microbatch.inputs) is not None
    chunk = ChunkPlan.build(model)
    with Runner(streams="inline") as runner:
        result = runner.run(schedules.forward_only(chunk.shape, 1), chunk, [dict(microbatch.inputs)])
    assert torch.equal(result.outputs[0], expected)


def test_the_method_of_another_object_is_refused() -> None:
    """It works on that object's parameters."""
    model = make_model(_CELL)
    first, second = model.decoder.layers
    second.forward = first.forward
    with pytest.raises(UnsupportedLayerError, match=r"TransformerLayer overrides forward\(\)"):
        LayerPlan.build(second)
