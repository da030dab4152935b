"""Refuses methods of a user's own on modules of Megatron-Core where the split path does not call them."""

from __future__ import annotations

from types import MethodType
from typing import Any

from megatron.core.models.gpt import GPTModel
from megatron.core.models.hybrid.hybrid_block import HybridStack
from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionBlock
from megatron.core.transformer.transformer_block import TransformerBlock
from torch.nn import Module

from layernodes.errors import UnsupportedLayerError


def check_override(module: Any, method: str, *bases: type, instead: str | None = None) -> None:
    """Raise UnsupportedLayerError where ``module`` has a ``method`` of its own, by its class or on the object.

    Args:
        module: the module.
        method: the name; one that the bases have not may not be on the module either.
        bases: the classes whose methods the split path does the work of.
        instead: what to do instead; None for what goes with a layer.
    """
    found = _overridden(module, method, *bases)
    if found is not None:
        cure = instead or f"move it into a node of your own, or into a submodule that {bases[0].__name__} calls"
        raise UnsupportedLayerError(
            f"{type(module).__name__} overrides {method}(), which the split path does not call: what it adds would be "
            f"lost; {cure}",
            field=f"{type(module).__name__}.{method}",
            value=found,
        )


def check_block(block: Any) -> None:
    """Raise UnsupportedLayerError for a decoder, or an MTP block, with a ``forward`` of its own."""
    kinds = (HybridStack, MultiTokenPredictionBlock)
    check_override(block, "forward", next((kind for kind in kinds if isinstance(block, kind)), TransformerBlock))


def check_model(model: Any, model_class: type[Module]) -> None:
    """Raise UnsupportedLayerError for a model with a ``forward`` of its own, or a block with one."""
    check_override(model, "forward", model_class, instead=_instead_of(model_class))
    check_block(model.decoder)
    mtp = getattr(model, "mtp", None)
    if mtp is not None:
        check_block(mtp)


def check_schedule_plan(model: Any, model_class: type[Module]) -> None:
    """Raise UnsupportedLayerError for a model with a ``build_schedule_plan`` of its own, in whose place ours stands."""
    check_override(model, "build_schedule_plan", model_class, instead=_instead_of(model_class))


def check_planned_model(model: Any) -> None:
    """Raise UnsupportedLayerError for a ``GPTModel`` with a ``forward`` of its own that builds its schedule plan as the
    class does; one with a ``build_schedule_plan`` of its own too does in it what it has to."""
    if _overridden(model, "build_schedule_plan", GPTModel) is None:
        check_override(model, "forward", GPTModel, instead=_instead_of(GPTModel))


def _instead_of(model_class: type[Module]) -> str:
    """What to do instead of overriding a method of the model."""
    called = "override _preprocess or _postprocess instead, or " if issubclass(model_class, GPTModel) else ""
    return f"{called}put it into a layer or another submodule"


def _overridden(module: Any, method: str, *bases: type) -> Any:
    """The ``method`` of ``module`` where it is another than that of each of ``bases``, None where it is not; compiled,
    or bound to the module and put on it, it is still the same."""
    found = vars(module).get(method) or getattr(type(module), method, None)
    function = getattr(found, "_torchdynamo_orig_callable", found)
    if isinstance(function, MethodType) and function.__self__ is module:
        function = function.__func__
    return found if all(function is not getattr(base, method, None) for base in bases) else None
