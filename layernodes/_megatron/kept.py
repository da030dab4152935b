"""Leaves a model as it was, whatever ran meanwhile: for measuring a model that is in training."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from layernodes._megatron.rng import Generators

# What Megatron-Core's routers count on themselves, outside their buffers, for global load balancing.
_COUNTERS: Final = ("global_tokens_per_expert", "ga_steps")


@contextmanager
def kept_state(modules: Iterable[Module]) -> Iterator[None]:
    """Put gradients (``grad``, ``main_grad``), buffers, routers' counters and random generators back on leaving."""
    found = list(dict.fromkeys(inner for module in modules for inner in module.modules()))
    parameters = list(dict.fromkeys(p for module in found for p in module.parameters(recurse=False)))
    buffers = [(buffer, buffer.detach().clone()) for module in found for buffer in module.buffers(recurse=False)]
    counters = [
        (module, name, _copy(module.__dict__[name]))
        for module in found
        for name in _COUNTERS
        if name in module.__dict__
    ]
    main_grads = [(parameter, *_main_grad(parameter)) for parameter in parameters]
    generators = Generators()
    states = generators.states()
    gradients = [parameter.grad for parameter in parameters]  # set aside only when nothing above can run out of memory
    try:
        for parameter in parameters:
            parameter.grad = None
        yield
    finally:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        held: Any
        for held, main_grad, was_added in main_grads:
            if main_grad is not None:
                held.main_grad.copy_(main_grad)
            if was_added is not None:
                held.grad_added_to_main_grad = was_added
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)
        for module, name, value in counters:
            module.__dict__[name] = value
        generators.restore(states)


def _main_grad(parameter: Parameter) -> tuple[Tensor | None, bool | None]:
    """A copy of what a parameter has gathered in ``main_grad``, and whether its ``grad`` is in it already."""
    main_grad = getattr(parameter, "main_grad", None)
    return (
        main_grad.detach().clone() if isinstance(main_grad, Tensor) else None,
        getattr(parameter, "grad_added_to_main_grad", None),
    )


def _copy(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value
