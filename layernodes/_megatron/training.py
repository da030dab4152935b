"""Megatron-Core's training loop: the names through which it drives a schedule plan, and the flags that make it do
so."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Final

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.pipeline_parallel.utils import AbstractSchedulePlan
from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionLayer
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn import Module

from layernodes.errors import NodeStateError

__all__ = ["AbstractSchedulePlan", "GPTModel"]

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
    """Let ``GPTModel.build_schedule_plan`` be ``build``, called with the model and its arguments.

    Raises:
        NodeStateError: it is replaced already.
    """
    own = GPTModel.__dict__["build_schedule_plan"]
    if hasattr(own, _MARK):
        raise NodeStateError(
            "inside another schedule(): leave that one first, or give all model chunks of this rank to one schedule()"
        )

    @functools.wraps(own)
    def build_schedule_plan(self: GPTModel, *args: Any, **kwargs: Any) -> Any:
        return build(self, *args, **kwargs)

    setattr(build_schedule_plan, _MARK, True)
    GPTModel.build_schedule_plan = build_schedule_plan
    try:
        yield
    finally:
        GPTModel.build_schedule_plan = own


def received_input(model: Any) -> Tensor | None:
    """What the pipeline handed to a chunk without pre-process (``set_input_tensor``)."""
    return None if model.pre_process else model.decoder.input_tensor


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
