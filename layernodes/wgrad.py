"""Deferred weight gradients: parked by a backward, computed and delivered by a later step.

A linear layer's backward makes two products, the input's gradient, which the next backward waits for, and the
weight's, which
nobody waits for. To defer the second:

    forward    the weight takes part detached, so that it is no edge of the node's graph; an anchor that requires grad
    is, so
               that the backward runs. Around the node's forward, a stand-in leaf takes the weight's place in its
               module: what
               other operations contribute to the weight lands there, and not on the weight ahead of time
    backward   computes the input's gradient and parks (weight, how to compute its gradient): the input and the output's
               gradient are all that is held
    drain      computes what was parked, in the order in which it was parked, sums it per weight as plain autograd
    would, and
               delivers each sum through autograd, so that every hook of the weight fires once, with the gradient there
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple, final

import torch
from torch import Tensor
from torch.autograd import Variable
from torch.nn import Module, Parameter

from layernodes.errors import NodeStateError
from layernodes.stand_in import put_stand_in


class Site(NamedTuple):
    """A place where a module holds a parameter."""

    module: Module
    name: str
    parameter: Parameter


def stand_in_for(parameter: Parameter) -> Parameter:
    """A leaf with the parameter's data and attributes (``main_grad``, parallelism marks), and a gradient of its own."""
    stand_in = Parameter(parameter.detach(), requires_grad=True)
    stand_in.__dict__.update(parameter.__dict__)
    return stand_in


def deliver(parameter: Tensor, gradient: Tensor) -> None:
    """Accumulate ``gradient`` into a leaf through autograd, so that its hooks fire."""
    Variable._execution_engine.run_backward(
        (parameter,),
        (gradient,),
        keep_graph=False,
        create_graph=False,
        inputs=(),
        allow_unreachable=True,
        accumulate_grad=True,
    )


@final
class WgradStore:
    """The weight gradients that one node deferred in one microbatch.

    The parking primitive: a node's own ``autograd.Function`` gets the store in its forward
    (``node.wgrad_store(ctx)``), uses
    ``detached(weight)`` and ``anchor`` there, and calls ``park`` in its backward.
    """

    __slots__ = ("_anchor", "_originals", "_parked")

    def __init__(self) -> None:
        self._originals: dict[int, tuple[Parameter, Parameter]] = {}
        self._parked: list[tuple[int, Callable[[], Tensor | None]]] = []
        self._anchor: Tensor | None = None

    @property
    def anchor(self) -> Tensor:
        """An empty leaf that requires grad: pass it to the ``Function`` so that its backward runs."""
        if self._anchor is None:
            self._anchor = torch.empty(0, requires_grad=True)
        return self._anchor

    def defers(self, weight: Tensor | None) -> bool:
        """Whether ``weight``, as the node's module holds it now, is one whose gradient this store defers."""
        return weight is not None and id(weight) in self._originals

    def park(self, weight: Tensor, compute: Callable[[], Tensor | None]) -> None:
        """Defer a gradient of ``weight``; ``compute`` returns it, of the weight's shape, when the store is drained.

        Args:
            weight: the weight as the module held it in forward; one that ``defers`` is true of.
            compute: called once, by the ``W`` step; None where it added the gradient elsewhere (``main_grad``) itself.

        Raises:
            NodeStateError: the weight is not deferred here.
        """
        if id(weight) not in self._originals:
            raise NodeStateError(
                "park() was given a weight that its node does not defer; let deferred_parameters() return it, "
                "and pass the "
                "weight as the module holds it during forward"
            )
        self._parked.append((id(weight), compute))

    @property
    def num_parked(self) -> int:
        """How many gradients wait to be computed."""
        return len(self._parked)

    @contextmanager
    def standing_in(self, sites: Sequence[Site]) -> Iterator[None]:
        """Hold a stand-in at every site for the forward of the node."""
        undo: list[Callable[[], None]] = []
        made: dict[int, Parameter] = {}
        try:
            for site in sites:
                current = site.module._parameters[site.name]
                if current is None or not current.requires_grad:
                    continue
                stand_in = made.get(id(current))
                if stand_in is None:
                    stand_in = made[id(current)] = stand_in_for(current)
                    self._originals[id(stand_in)] = (current, stand_in)
                undo.append(put_stand_in(site.module, site.name, stand_in))
            yield
        finally:
            for put_back in reversed(undo):
                put_back()

    def drain(self) -> None:
        """Compute and deliver everything; the store is empty afterwards."""
        originals, self._originals = self._originals, {}
        parked, self._parked = self._parked, []
        self._anchor = None
        sums: dict[int, Tensor] = {
            key: stand_in.grad for key, (_, stand_in) in originals.items() if stand_in.grad is not None
        }
        with torch.no_grad():
            for key, compute in parked:
                gradient = compute()
                if gradient is not None:
                    sums[key] = gradient if key not in sums else sums[key] + gradient
        del parked
        for key, gradient in sums.items():
            parameter, stand_in = originals[key]
            if getattr(stand_in, "grad_added_to_main_grad", False):
                parameter.grad_added_to_main_grad = True  # type: ignore[attr-defined]
            deliver(parameter, gradient)


@final
class StoreHook:
    """The weight-gradient hook of one node and microbatch: modules that defer their own, then the node's store.

    Args:
        node: the node.
        modules: objects with ``backward_dw()`` and ``parameters()``; called in order.
        parameters: the parameters that the node's store defers.
    """

    __slots__ = ("_modules", "_parameters", "_store", "node")

    def __init__(self, node: object, modules: Sequence[object] = (), parameters: Iterable[Parameter] = ()) -> None:
        self.node = node
        self._modules = tuple(modules)
        self._parameters = tuple(parameters)
        self._store: WgradStore | None = None

    def bind(self, store: WgradStore) -> None:
        """Give the hook the store of the forward that it belongs to."""
        self._store = store

    def backward_dw(self) -> None:
        """Compute and accumulate the deferred weight gradients."""
        for module in self._modules:
            module.backward_dw()  # type: ignore[attr-defined]
        if self._store is not None:
            self._store.drain()

    def parameters(self) -> Iterator[Parameter]:
        """The parameters whose gradients ``backward_dw`` delivers."""
        for module in self._modules:
            yield from module.parameters()  # type: ignore[attr-defined]
        yield from self._parameters

    @property
    def num_parked(self) -> int:
        """How many gradients wait to be computed."""
        return 0 if self._store is None else self._store.num_parked


_HOOKS = "layernodes_store_hooks"


def find_hook(ctx: object, node: object) -> StoreHook | None:
    """The hook of ``node`` for the microbatch of ``ctx``; None where nobody will drain one.

    A caller keeps the hooks of a slot on its context (``bwd_dw_callables``), and those of the communication slots
    with an
    earlier slot of the layer; each is noted on the layer state as its context comes by.
    """
    state = ctx.layer_state.__dict__  # type: ignore[attr-defined]
    noted: dict[int, StoreHook] = state.setdefault(_HOOKS, {})
    for hook in getattr(ctx, "bwd_dw_callables", None) or ():
        if isinstance(hook, StoreHook):
            noted[id(hook.node)] = hook
    return noted.pop(id(node), None)
