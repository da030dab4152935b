"""Deferred weight gradients: parked by a backward, computed and delivered by a later step.

A linear layer's backward makes two products, the input's gradient, which the next backward waits for, and the
weight's, which nobody waits for. To defer the second:

    forward    the weight takes part detached, so that it is no edge of the node's graph; an anchor that requires grad
               is, so that the backward runs. Around the node's forward, a stand-in leaf takes the weight's place in
               its module: what other operations contribute to the weight lands there, and not on the weight ahead of
               time
    backward   computes the input's gradient and parks (weight, how to compute its gradient): the input and the
               output's gradient are all that is held
    drain      weight by weight: computes what was parked, sums it as plain autograd would, and delivers the sum
               through autograd, so that every hook of the weight fires once, with the gradient there
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, final

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from layernodes.deferred_weight import Compute, DeferredWeight
from layernodes.errors import NodeStateError, PlanError
from layernodes.stand_in import Site, replaced, stand_in_for


def _saved_tensor_hooks() -> object:
    return torch._C._autograd._top_saved_tensors_default_hooks(False)


_MEND = 'leave the weight out of deferred_parameters(), or build the plan with wgrad="off"'


def _inner_backward(name: str) -> NodeStateError:
    return NodeStateError(
        f"a node's forward differentiates through {name} (torch.autograd.grad or backward), whose gradient is deferred "
        f"and has no place to go before the node's own backward; {_MEND}"
    )


def take_store(ctx: Any) -> WgradStore:
    """The store on a function's context, in its backward, which runs once.

    Raises:
        NodeStateError: it ran before.
    """
    store: WgradStore | None = ctx.store
    if store is None:
        raise NodeStateError(
            f"the backward of a product with a deferred weight ran a second time, which would add its gradient twice; "
            f"go backward once, or {_MEND}"
        )
    ctx.store = None
    return store


@final
class WgradStore:
    """The weight gradients that one node deferred in one microbatch.

    The parking primitive: a node's own ``autograd.Function`` gets the store (``node.wgrad_store(ctx)``), the weight's
    ``detach()``, and ``anchor`` in its forward, and calls ``park`` in its backward.

    Args:
        on_park, on_drain: called when the first gradient is parked, and when all are computed.
    """

    __slots__ = ("_anchor", "_deferred", "_in_forward", "_on_drain", "_on_park", "_outer_hooks", "_waiting")

    def __init__(
        self, *, on_park: Callable[[], object] | None = None, on_drain: Callable[[], object] | None = None
    ) -> None:
        self._on_park, self._on_drain = on_park, on_drain
        self._outer_hooks = _saved_tensor_hooks()
        self._deferred: dict[int, DeferredWeight] = {}  # by id of the stand-in
        self._waiting: dict[int, DeferredWeight] = {}  # those of which something is parked, in order of the first
        self._anchor: Tensor | None = None
        self._in_forward = False

    @property
    def anchor(self) -> Tensor:
        """An empty leaf that requires grad: pass it to the ``Function`` so that its backward runs."""
        if self._anchor is None:
            self._anchor = torch.empty(0, requires_grad=True)
        return self._anchor

    def defers(self, weight: Tensor | None) -> bool:
        """Whether ``weight``, as the node's module holds it now, is one whose gradient this store defers."""
        return weight is not None and id(weight) in self._deferred

    def can_defer(self, weight: Tensor | None) -> bool:
        """Whether a product of ``weight`` may be deferred here and now.

        Not without recording, nor under autocast, whose casts take part in the sum of a weight's gradients, nor inside
        an activation checkpoint, which records its forward a second time, nor in a ``torch.func`` transform, which our
        function is not made for: the stand-in then gets the gradient in backward.
        """
        return (
            weight is not None
            and id(weight) in self._deferred
            and torch.is_grad_enabled()
            and not torch.is_autocast_enabled(weight.device.type)
            and _saved_tensor_hooks() == self._outer_hooks
            and not torch._C._are_functorch_transforms_active()
        )

    def park(self, weight: Tensor, compute: Compute) -> None:
        """Defer a gradient of ``weight``; ``compute`` returns it, of the weight's shape, when the store is drained.

        Args:
            weight: the weight as the module held it in forward; one that ``defers`` is true of.
            compute: called once, by the ``W`` step; None where it added the gradient elsewhere (``main_grad``) itself.

        Raises:
            NodeStateError: the weight is not deferred here, or its node's forward still runs.
        """
        deferred = self._deferred.get(id(weight))
        if deferred is None:
            raise NodeStateError(
                "park() was given a weight that its node does not defer; let deferred_parameters() return it, "
                "pass the weight as the module holds it during forward, and park it before its W step"
            )
        if self._in_forward:
            raise _inner_backward(deferred.name)
        deferred.park(compute)
        if not self._waiting and self._on_park is not None:
            self._on_park()
        self._waiting.setdefault(id(weight), deferred)

    def check_wanted(self, weight: Tensor) -> None:
        """Refuse to differentiate by ``weight`` in the node's forward once a product was deferred: no edge leads to it.

        Raises:
            NodeStateError: the weight is deferred here, and the store's anchor was given out.
        """
        deferred = self._deferred.get(id(weight))
        if deferred is not None and self._anchor is not None:
            raise _inner_backward(deferred.name)

    @property
    def num_parked(self) -> int:
        """How many gradients wait to be computed."""
        return sum(deferred.num_parked for deferred in self._waiting.values())

    @contextmanager
    def standing_in(self, sites: Sequence[Site]) -> Iterator[None]:
        """Hold a stand-in at every one of ``sites`` for the forward of the node."""
        made: dict[int, Parameter] = {}
        swaps: dict[tuple[int, str], tuple[Module, str, Parameter]] = {}
        for module, name, _ in sites:
            current = module._parameters[name]
            if current is None or not current.requires_grad:
                continue
            stand_in = made.get(id(current))
            if stand_in is None:
                stand_in = made[id(current)] = stand_in_for(current)
                self._deferred[id(stand_in)] = DeferredWeight(f"{type(module).__name__}.{name}", current, stand_in)
            swaps[id(module), name] = (module, name, stand_in)
        self._in_forward = True
        try:
            with replaced(swaps.values()):
                yield
        finally:
            self._in_forward = False

    def drain(self) -> None:
        """Compute and deliver everything, one weight after the other; the store is empty afterwards."""
        deferred, self._deferred = self._deferred, {}
        waiting, self._waiting = self._waiting, {}
        self._anchor = None
        rest = [one for key, one in deferred.items() if key not in waiting]
        deferred.clear()
        for one in rest:
            one.deliver()
        while waiting:
            waiting.pop(next(iter(waiting))).deliver()
        if self._on_drain is not None:
            self._on_drain()


class WgradHook(Protocol):
    """Computes the weight gradients that one node deferred in one microbatch."""

    def backward_dw(self) -> None:
        """Compute and accumulate them."""
        ...

    def parameters(self) -> Iterable[Parameter]:
        """The parameters whose gradients ``backward_dw`` delivers."""
        ...


def check_hook(name: str, hook: object) -> None:
    """Refuse what a node of class ``name`` returned from ``wgrad_hook()`` and a ``W`` step could not call.

    Raises:
        PlanError: it is neither None nor an object with the two methods of ``WgradHook``.
    """
    if hook is None:
        return
    if isinstance(hook, type):
        raise PlanError(
            f"{name}.wgrad_hook() returned the class {hook.__name__}; return an object of it, made anew at each call"
        )
    missing = [f"no {verb!r}" for verb in ("backward_dw", "parameters") if not callable(getattr(hook, verb, None))]
    if missing:
        raise PlanError(
            f"{name}.wgrad_hook() returned {type(hook).__name__}, which has {' and '.join(missing)}; return an "
            f"object with backward_dw(), which computes what backward held back, and parameters(), which names the "
            f"weights. Where no module holds gradients back, leave wgrad_hook() out: those of linears are deferred "
            f"without it"
        )


@final
class StoreHook:
    """The weight-gradient hook of one node and microbatch: modules that defer their own, then the node's store.

    Args:
        node: the node.
        modules: objects with ``backward_dw()`` and ``parameters()``; called in order.
        parameters: the parameters that the node's store defers.
    """

    __slots__ = ("_modules", "_parameters", "_pending", "_store", "node")

    def __init__(self, node: object, modules: Sequence[object] = (), parameters: Iterable[Parameter] = ()) -> None:
        self.node = node
        self._modules = tuple(modules)
        self._parameters = tuple(parameters)
        self._store: WgradStore | None = None
        self._pending: dict[int, StoreHook] | None = None

    def watch(self, pending: dict[int, StoreHook]) -> None:
        """Stand in ``pending``, by id, whenever something waits in the store."""
        self._pending = pending

    def new_store(self) -> WgradStore:
        """The store of the forward that the hook belongs to."""
        pending = self._pending
        if pending is None:
            self._store = WgradStore()
        else:
            self._store = WgradStore(
                on_park=lambda: pending.update({id(self): self}), on_drain=lambda: pending.pop(id(self), None)
            )
        return self._store

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
    with an earlier slot of the layer; each is noted on the layer state as its context comes by.
    """
    state = ctx.layer_state.__dict__  # type: ignore[attr-defined]
    noted: dict[int, StoreHook] = state.setdefault(_HOOKS, {})
    for hook in getattr(ctx, "bwd_dw_callables", None) or ():
        if isinstance(hook, StoreHook):
            noted[id(hook.node)] = hook
    return noted.pop(id(node), None)
