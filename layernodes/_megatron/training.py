"""Megatron-Core's training loop: the names through which it drives a schedule plan, and the flags that make it do
so."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, Final

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.pipeline_parallel.utils import AbstractSchedulePlan
from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionLayer
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.nn import Module

from layernodes._megatron.chunks import CHUNKS
from layernodes.errors import NodeStateError

__all__ = ["AbstractSchedulePlan", "GPTModel"]

_NAME: Final = "build_schedule_plan"
_MARK: Final = "_layernodes_schedule"
WGRAD_WRAPPER: Final = "backward_dw_wrapper"
"""The attribute of a layer that nodes make anew for each microbatch, as Megatron-Core does."""


def configs_of(models: Iterable[Module]) -> list[TransformerConfig]:
    """Every configuration object that a module of the chunks holds, each once: layers may hold copies."""
    found: dict[int, TransformerConfig] = {}
    for model in models:
        for module in model.modules():
            config = getattr(module, "config", None)
            if isinstance(config, TransformerConfig):
                found[id(config)] = config
    return list(found.values())


@contextmanager
def overlap_flags(models: Iterable[Module], *, delay_wgrad: bool) -> Iterator[None]:
    """Set the flags by which Megatron-Core's loop drives schedule plans, on existing configurations, and restore
    them."""
    saved = []
    try:
        for config in configs_of(models):
            saved.append((config, config.overlap_moe_expert_parallel_comm, config.delay_wgrad_compute))
            config.overlap_moe_expert_parallel_comm = True
            config.delay_wgrad_compute = delay_wgrad
        yield
    finally:
        for config, overlap, delay in saved:
            config.overlap_moe_expert_parallel_comm = overlap
            config.delay_wgrad_compute = delay


@contextmanager
def no_wrappers_left(models: Iterable[Module]) -> Iterator[None]:
    """Take the wrappers of weight-gradient calls off layers again, which each microbatch makes anew on them."""
    modules = [module for model in models for module in model.modules()]
    before = {id(module): module.__dict__.get(WGRAD_WRAPPER) for module in modules}
    try:
        yield
    finally:
        for module in modules:
            if before[id(module)] is not None:
                module.__dict__[WGRAD_WRAPPER] = before[id(module)]
            else:
                module.__dict__.pop(WGRAD_WRAPPER, None)


@contextmanager
def schedule_plans_built_by(build: Callable[..., Any]) -> Iterator[None]:
    """Let ``build_schedule_plan`` of every model class be ``build``, called with the model and its arguments by name.

    Raises:
        NodeStateError: it is replaced already.
    """
    with ExitStack() as stack:
        for model_class in CHUNKS:
            own = vars(model_class).get(_NAME)
            if hasattr(own, _MARK):
                raise NodeStateError(
                    "inside another schedule(): leave that one first, or give all model chunks of this rank to one "
                    "schedule()"
                )
            stack.callback(_restore, model_class, own)
            setattr(model_class, _NAME, _builder(own or vars(model_class)["forward"], build))
        yield


def _builder(mirrored: Callable[..., Any], build: Callable[..., Any]) -> Callable[..., Any]:
    """A method with the parameters of ``mirrored``, and any others by name."""
    signature = inspect.signature(mirrored)
    others = inspect.Parameter("others", inspect.Parameter.VAR_KEYWORD)
    signature = signature.replace(parameters=[*signature.parameters.values(), others])

    def build_schedule_plan(self: Any, *args: Any, **kwargs: Any) -> Any:
        arguments = dict(signature.bind(self, *args, **kwargs).arguments)
        arguments |= arguments.pop("others", {})
        return build(arguments.pop("self"), **arguments)

    functools.update_wrapper(build_schedule_plan, mirrored)
    build_schedule_plan.__name__ = _NAME
    setattr(build_schedule_plan, _MARK, True)
    return build_schedule_plan


def _restore(model_class: Any, own: Callable[..., Any] | None) -> None:
    if own is None:
        delattr(model_class, _NAME)
    else:
        setattr(model_class, _NAME, own)


def hooked_module(layer: Module) -> Module:
    """What FSDP gathers and releases as one unit for a layer: inside MTP, the transformer layer."""
    module: Module = layer.mtp_model_layer if isinstance(layer, MultiTokenPredictionLayer) else layer
    return module


def autocast_context(model: Any) -> AbstractContextManager[Any]:
    """The autocast under which a configuration wants its steps; Megatron-Core's combined step loses it."""
    config = model.config
    return torch.autocast("cuda", dtype=config.autocast_dtype) if config.enable_autocast else nullcontext()


@contextmanager
def backward_timer(model: Any) -> Iterator[None]:
    """Megatron-Core's timer of a backward pass, which its combined step, unlike its plain one, leaves out."""
    timers = None if model is None else model.config.timers
    if timers is None:
        yield
        return
    timer = timers("backward-compute", log_level=2)
    timer.start()
    try:
        yield
    finally:
        timer.stop()


def new_event() -> Any:
    """The event that Megatron-Core's loss node synchronizes on."""
    return torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch leaves its __new__ untyped
