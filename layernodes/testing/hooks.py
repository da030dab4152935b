"""What a node's own weight-gradient hook says of itself, held against what its ``W`` steps do."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

from torch.nn import Module, Parameter

from layernodes._megatron.wgrad import ModulesHook
from layernodes.nodes import ScheduleNode
from layernodes.plan import schedules
from layernodes.plan.registry import SlotKey
from layernodes.plan.step import Step
from layernodes.slots import Phase, Slot
from layernodes.testing.bench import NodeBench, node_names
from layernodes.testing.report import Check, Finding

_LEAVE_OUT: Final = "leave wgrad_hook() out: the gradients of linears are deferred without it"


def check_hooks(bench: NodeBench, slot: SlotKey) -> Iterator[Finding]:
    """The hooks of the nodes at ``slot`` are fresh, name parameters that the nodes hold, and deliver them in ``W``."""
    nodes = [(name, node) for name, node in node_names(bench.chunk) if node.slot == slot]
    for name, node in nodes:
        yield from _check_hook(name, node)
    named = {name: tuple(p for p in node.own_deferred_parameters() if p.requires_grad) for name, node in nodes}
    if not any(bench.chunk.shape.wgrad_slots) or not any(named.values()):
        return
    delivered = _delivered(bench, slot, [parameter for own in named.values() for parameter in own])
    for name, node in nodes:
        own = named[name]
        if own and not any(id(parameter) in delivered for parameter in own):
            yield Finding(
                check=Check.LIFE_CYCLE,
                found=f"the hook of {name} names {_names(node, own)}, and no W delivers any of it: it comes with B",
                advice=f"let the module hold the gradient back in backward and compute it in its own backward_dw(), "
                f"which the hook calls; where no module does, {_LEAVE_OUT}",
            )


def _check_hook(name: str, node: ScheduleNode) -> Iterator[Finding]:
    first, second = node.wgrad_hook(), node.wgrad_hook()
    if first is None or second is None:
        return
    if first is second:
        yield Finding(
            check=Check.LIFE_CYCLE,
            found=f"{name}.wgrad_hook() returns the same object twice",
            advice="return a fresh hook for each microbatch: two may wait for their W at once",
        )
    held = {id(parameter) for module in node.modules() for parameter in module.parameters()}
    own = [id(parameter) for parameter in first.parameters()]
    if not held.issuperset(own):
        yield Finding(
            check=Check.LIFE_CYCLE,
            found=f"the hook of {name} delivers gradients of parameters that no module of modules() holds",
            advice="let modules() return the modules that hold them",
        )
    if held and not own and not isinstance(first, ModulesHook):
        yield Finding(
            check=Check.LIFE_CYCLE,
            found=f"the hook of {name} names no parameters, so that no W waits for what it computes",
            advice=f"let parameters() return the weights whose gradients backward_dw() delivers, or {_LEAVE_OUT}",
        )


def _delivered(bench: NodeBench, slot: SlotKey, parameters: Iterable[Parameter]) -> set[int]:
    """Ids of those whose gradient a ``W`` of ``slot`` changes."""
    slot_name = slot.value if isinstance(slot, Slot) else slot.name
    watched = {id(parameter): parameter for parameter in parameters}
    before: dict[int, object] = {}
    found: set[int] = set()

    def is_watched(step: Step) -> bool:
        return step.phase is Phase.W and step.slot == slot_name

    def begin(step: Step) -> None:
        if is_watched(step):
            before.update({key: _state(parameter) for key, parameter in watched.items()})

    def end(step: Step) -> None:
        if is_watched(step):
            found.update(key for key, parameter in watched.items() if _state(parameter) != before[key])

    serial = schedules.serial(bench.chunk.shape, bench.num_microbatches)
    bench.run(serial, before_step=begin, after_step=end)
    return found


def _state(parameter: Parameter) -> object:
    """What changes when a gradient is delivered, Megatron-Core's ``main_grad`` included."""
    gradients = (parameter.grad, getattr(parameter, "main_grad", None))
    return [(id(gradient), gradient._version) for gradient in gradients if gradient is not None]


def _names(node: ScheduleNode, parameters: Iterable[Parameter]) -> str:
    names = {
        id(parameter): f"{attribute}.{name}"
        for attribute, module in vars(node).items()
        if isinstance(module, Module)
        for name, parameter in module.named_parameters()
    }
    return ", ".join(names.get(id(parameter), "a parameter") for parameter in parameters)
