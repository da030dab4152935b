"""Leaves that take a parameter's place in its module for a while, and the gradient's way back to the parameter."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Final, NamedTuple

from torch import Tensor
from torch.nn import Module, Parameter
from torch.utils.hooks import RemovableHandle

from layernodes.autograd import accumulate

PARTS: Final = "layernodes_parts"
"""Where a stand-in keeps its parts, if it does."""


class Site(NamedTuple):
    """A place where a module holds a parameter; ``parameter`` is what was there when it was noted."""

    module: Module
    name: str
    parameter: Parameter

    @property
    def current(self) -> Parameter | None:
        """What the module holds there now: loading a checkpoint, for one, may have put another in its place."""
        return self.module._parameters[self.name]


def stand_in_for(parameter: Parameter) -> Parameter:
    """A leaf with the parameter's data and attributes (``main_grad``, parallelism marks), and a gradient of its own."""
    stand_in = Parameter(parameter.detach(), requires_grad=True)
    stand_in.__dict__.update(parameter.__dict__)
    stand_in.__dict__.pop(PARTS, None)
    return stand_in


def keeping_parts(stand_in: Parameter) -> Parameter:
    """Let a stand-in keep what is deferred of it part by part, for whoever adds these to a longer sum."""
    stand_in.__dict__[PARTS] = []
    return stand_in


def parts_of(stand_in: Parameter) -> list[Tensor]:
    """The parts that a stand-in keeps, in the order in which backward made them; it has none afterwards."""
    parts: list[Tensor] = stand_in.__dict__[PARTS]
    stand_in.__dict__[PARTS] = []
    return parts


@contextmanager
def replaced(sites: Iterable[tuple[Module, str, Parameter]]) -> Iterator[None]:
    """Let modules hold other parameters, given as (module, name, parameter), until the context is left.

    Hooks of the modules, before and after forward, still see their own: they may look it up, as Megatron-Core's DDP
    does to wait for the parameter's all-gather.
    """
    held: dict[tuple[int, str], tuple[Module, str, Parameter | None]] = {}
    handles: list[RemovableHandle] = []
    try:
        for module, name, parameter in sites:
            current = module._parameters[name]
            held.setdefault((id(module), name), (module, name, current))
            if module._forward_pre_hooks:
                handles.append(module.register_forward_pre_hook(partial(_hold, name, current), prepend=True))
                handles.append(module.register_forward_pre_hook(partial(_hold, name, parameter)))
            if module._forward_hooks:
                handles.append(module.register_forward_hook(partial(_hold, name, current), prepend=True))
                handles.append(module.register_forward_hook(partial(_hold, name, parameter)))
            module._parameters[name] = parameter
        yield
    finally:
        for handle in handles:
            handle.remove()
        for module, name, own in held.values():
            module._parameters[name] = own


def _hold(name: str, parameter: Parameter | None, module: Module, *_: object) -> None:
    module._parameters[name] = parameter


def deliver(parameter: Tensor, gradient: Tensor) -> None:
    """Accumulate ``gradient`` into a leaf through autograd, so that its hooks fire."""
    accumulate((parameter,), (gradient,))
