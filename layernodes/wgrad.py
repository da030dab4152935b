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
from typing import Protocol, final

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from layernodes.errors import NodeStateError, PlanError
from layernodes.stand_in import PARTS, Site, deliver, replaced, stand_in_for

Compute = Callable[[], Tensor | None]


class _Deferred:
    """One weight of a store: the parameter, its stand-in, and what contributes to its gradient."""

    __slots__ = ("_is_parked", "_parked", "_stand_in", "parameter")

    def __init__(self, parameter: Parameter, stand_in: Parameter) -> None:
        self.parameter = parameter
        self._stand_in = stand_in
        self._parked: list[Compute] = []
        # Of each contribution in order: parked, or arrived at the stand-in from other operations. The hook knows this
        # alone: what is parked may hold the stand-in, and would be held by it in turn where nobody computes it.
        is_parked: list[bool] = []
        self._is_parked = is_parked
        stand_in.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]  # torch leaves it untyped
            lambda _: is_parked.append(False)
        )

    def park(self, compute: Compute) -> None:
        self._parked.append(compute)
        self._is_parked.append(True)

    @property
    def num_parked(self) -> int:
        return len(self._parked)

    def deliver(self) -> None:
        """Sum the contributions as plain autograd does, and deliver; a stand-in that keeps its parts gets these."""
        parts = self.parameter.__dict__.get(PARTS)
        if parts is not None:
            parts.extend(self._compute())
            return
        total: Tensor | None = None
        for computed in self._compute():
            total = computed if total is None else total + computed
        if total is not None:
            deliver(self.parameter, total)

    def _compute(self) -> Iterator[Tensor]:
        """The contributions in the order in which backward made them."""
        contributions, stand_in = self._parked, self._stand_in
        gradient = stand_in.grad
        if gradient is not None:
            arrived = self._is_parked.index(False) if False in self._is_parked else len(contributions)
            contributions.insert(arrived, lambda: gradient)
        contributions.reverse()
        with torch.no_grad():
            while contributions:
                computed = contributions.pop()()
                if computed is not None:
                    yield computed.to(self.parameter.dtype)
        if getattr(stand_in, "grad_added_to_main_grad", False):
            # Megatron-Core's own mark on a parameter; torch's Parameter does not declare it.
            self.parameter.grad_added_to_main_grad = True  # type: ignore[attr-defined]


def _saved_tensor_hooks() -> object:
    return torch._C._autograd._top_saved_tensors_default_hooks(False)


@final
class WgradStore:
    """The weight gradients that one node deferred in one microbatch.

    The parking primitive: a node's own ``autograd.Function`` gets the store (``node.wgrad_store(ctx)``), the weight's
    ``detach()``, and ``anchor`` in its forward, and calls ``park`` in its backward.

    Args:
        on_park, on_drain: called when the first gradient is parked, and when all are computed.
    """

    __slots__ = ("_anchor", "_deferred", "_on_drain", "_on_park", "_outer_hooks", "_waiting")

    def __init__(
        self, *, on_park: Callable[[], object] | None = None, on_drain: Callable[[], object] | None = None
    ) -> None:
        self._on_park, self._on_drain = on_park, on_drain
        self._outer_hooks = _saved_tensor_hooks()
        self._deferred: dict[int, _Deferred] = {}  # by id of the stand-in
        self._waiting: dict[int, _Deferred] = {}  # those of which something is parked, in order of the first
        self._anchor: Tensor | None = None

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
            NodeStateError: the weight is not deferred here.
        """
        deferred = self._deferred.get(id(weight))
        if deferred is None:
            raise NodeStateError(
                "park() was given a weight that its node does not defer; let deferred_parameters() return it, "
                "pass the weight as the module holds it during forward, and park it before its W step"
            )
        deferred.park(compute)
        if not self._waiting and self._on_park is not None:
            self._on_park()
        self._waiting.setdefault(id(weight), deferred)

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
                self._deferred[id(stand_in)] = _Deferred(current, stand_in)
            swaps[id(module), name] = (module, name, stand_in)
        with replaced(swaps.values()):
            yield

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
