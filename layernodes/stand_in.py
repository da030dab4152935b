"""Puts a stand-in into a parameter's place in its module for a while.

The module's hooks still see the parameter itself: trainers look parameters up in them (DistributedDataParallel's
pre-forward hook waits for the all-gather of the module's own parameters), and a stand-in is not known to them::

    before forward    show the parameter; the module's own pre-forward hooks; hide it again
    after forward     show the parameter; the module's own forward hooks; hide it again
"""

from __future__ import annotations

from collections.abc import Callable

from torch.nn import Module, Parameter


def put_stand_in(module: Module, name: str, stand_in: Parameter) -> Callable[[], None]:
    """Let ``module`` hold ``stand_in`` as its parameter ``name``; returns what undoes it, last in, first out."""
    held = module._parameters[name]

    def show(*_: object) -> None:
        module._parameters[name] = held

    def hide(*_: object) -> None:
        module._parameters[name] = stand_in

    handles = []
    if module._forward_pre_hooks:
        handles += [module.register_forward_pre_hook(show, prepend=True), module.register_forward_pre_hook(hide)]
    if module._forward_hooks:
        handles += [module.register_forward_hook(show, prepend=True), module.register_forward_hook(hide)]

    def undo() -> None:
        for handle in handles:
            handle.remove()
        show()

    hide()
    return undo
