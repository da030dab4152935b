"""The node: an object that fills one slot of a layer.

A class declares its slot, its stream and the handoffs that it reads and writes; what is missing or wrong is refused
when the class is defined. An instance is bound to one layer, does not change after construction, and is shared by all
microbatches: whatever belongs to a microbatch travels through the context.

    call(ctx, inputs):
        inputs = copies of the inputs, where the caller will free storage that this node still needs
        outputs = forward(ctx, inputs)
        every declared handoff has been taken and written, else an error
        once per node: no edge of the graph reaches past the inputs and the handoffs taken, else an error
        outputs = copies of the outputs, where the next caller will free storage that somebody still uses
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar, Final, Self, final

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from layernodes._megatron.caller import caller_frees_input, caller_frees_output
from layernodes._megatron.deferral import deferrable_sites, deferring_parallel_linears
from layernodes.errors import NodeStateError
from layernodes.linear import deferring_products
from layernodes.nodes.copies import on_copies, own, owned
from layernodes.nodes.definition import check_complete, check_definition
from layernodes.nodes.edges import EdgeAudit, note_taken, note_written
from layernodes.slots import ExtraSlot, Slot, StreamType
from layernodes.stand_in import Site
from layernodes.state import FusedContext, HandoffMap, NodeContext, fits, handoffs_of, spelling
from layernodes.wgrad import StoreHook, WgradHook, WgradStore, find_hook

_STORE: Final = "layernodes_wgrad_store"
_VERBS: Final = ("put", "take", "__call__", "wgrad_store", "defer_wgrads", "new_hook")


class ScheduleNode(ABC):
    """One slot of one layer.

    Subclasses declare ``slot`` and ``stream`` (inherited where a base has them) and, where they exchange more than the
    slot's inputs and outputs, ``reads`` and ``writes``. They override ``forward``, and may override ``wgrad_hook`` and
    ``frees_input``. ``put``, ``take`` and ``__call__`` are final.

    Raises:
        NodeDefinitionError: at class definition, for a missing or wrong declaration; without ``forward``, when made.
    """

    slot: ClassVar[Slot | ExtraSlot]
    stream: ClassVar[StreamType]
    reads: ClassVar[HandoffMap] = {}
    writes: ClassVar[HandoffMap] = {}

    _reads: HandoffMap
    _writes: HandoffMap
    _audit: EdgeAudit
    _wgrad_sites: tuple[Site, ...]
    _has_wgrad: bool

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        check_definition(cls, verbs=_VERBS)

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:  # Any: a subclass's own __init__ says what it takes
        """Bind the declarations, so that a subclass need not call ``super().__init__`` for the verbs to work."""
        check_complete(cls)
        node = super().__new__(cls)
        node._reads = cls.reads
        node._writes = cls.writes
        node._audit = EdgeAudit()
        node._wgrad_sites = ()
        node._has_wgrad = False
        return node

    @abstractmethod
    def forward(self, ctx: NodeContext, *inputs: Tensor) -> Tensor | tuple[Tensor, ...]:
        """Do the slot's work for one microbatch.

        Args:
            ctx: the microbatch; exchange handoffs through ``self.take(ctx, name)`` and ``self.put(ctx, name, value)``.
            inputs: what the previous slot returned, detached; their gradients go back to it.
        """

    def wgrad_hook(self) -> WgradHook | None:
        """A fresh hook that computes this node's deferred weight gradients for one microbatch; None: nothing to
        defer."""
        return None

    def deferred_parameters(self) -> tuple[Parameter, ...]:
        """The weights whose gradients may be deferred.

        By default those of the linears among ``modules()``, and matrices that modules of your own hold. Of a weight
        named here, products in ``forward`` (``F.linear(x, w)``, ``x @ w``, ``torch.einsum``, ...) are deferred; what
        other operations contribute to it is computed with ``B`` and delivered with ``W``.
        """
        return tuple(site.parameter for site in deferrable_sites(self.modules()))

    def own_deferred_parameters(self) -> tuple[Parameter, ...]:
        """The weights that ``wgrad_hook()`` delivers: modules that hold their gradients back by themselves, or a
        user's."""
        hook = self.wgrad_hook()
        return () if hook is None else tuple(hook.parameters())

    def frees_input(self) -> bool:
        """Whether the storage of the inputs may be freed after forward: a permission, acted on only with proof."""
        return False

    def modules(self) -> tuple[Module, ...]:
        """The modules whose parameters ``forward`` uses; by default those among the node's attributes.

        A chunk plan finds by it the parameters that several nodes use, and sums their gradients as plain autograd does.
        Hold only what the node uses: nodes on different streams that share a parameter run one after the other.
        """
        return tuple(value for value in vars(self).values() if isinstance(value, Module))

    def touches_rng(self) -> bool:
        """Whether forward or backward may draw from, fork or restore a random generator.

        Such steps run in the schedule's order and never two at once. Say False where you know better.
        """
        return True

    def keeps_input(self) -> bool:
        """Whether ``forward`` may still use its inputs' storage (saved by autograd, or in an output) when it returns.

        Asked only under a caller that frees inputs without proof, as Megatron-Core's own node class does; the node is
        then given copies. Say False where you know better.
        """
        return True

    def copies(self) -> tuple[str, ...]:
        """Why this node works on or hands on copies under a caller that frees inputs without proof; for
        descriptions."""
        return ("input: freed by slot name while this node or autograd may still use it",) if self.keeps_input() else ()

    @final
    def put(self, ctx: NodeContext, name: str, value: object) -> None:
        """Leave a handoff for a later slot of the layer.

        A tensor that requires grad is cut from this node's graph; its gradient flows back through this node.

        Args:
            ctx, name, value: the microbatch, the handoff's name in ``writes``, and what is handed over.

        Raises:
            NodeStateError: the name is not declared in ``writes``, the type differs, or it was written before.
        """
        declared = self._writes.get(name)
        if declared is None:
            raise NodeStateError(
                f"{type(self).__name__} writes {name!r}, which it does not declare; "
                f"add it to its 'writes' (declared: {sorted(self._writes) or 'nothing'})"
            )
        if not fits(value, declared):
            raise NodeStateError(
                f"{type(self).__name__} writes {name!r} as {type(value).__name__}, declared as {spelling(declared)}"
            )
        handoffs_of(ctx.layer_state).write(name, self._cut(ctx, name, value) if isinstance(value, Tensor) else value)

    @final
    def take(self, ctx: NodeContext, name: str) -> object:
        """Take a handoff that an earlier slot of the layer left, of the microbatch ``ctx``.

        Raises:
            NodeStateError: the name is not declared in ``reads``, was not written, or was already taken.
        """
        if name not in self._reads:
            raise NodeStateError(
                f"{type(self).__name__} takes {name!r}, which it does not declare; "
                f"add it to its 'reads' (declared: {sorted(self._reads) or 'nothing'})"
            )
        value = handoffs_of(ctx.layer_state).take(name)
        if not fits(value, self._reads[name]):
            raise NodeStateError(
                f"{type(self).__name__} takes {name!r} as {spelling(self._reads[name])}, "
                f"but it was written as {type(value).__name__}; declare the same type on both sides"
            )
        note_taken(ctx, value)
        return value

    @final
    def __call__(self, ctx: NodeContext, *inputs: Tensor) -> Tensor | tuple[Tensor, ...]:
        """Run ``forward`` and hold it to the node's declarations; this is what a scheduler calls."""
        is_inner = isinstance(ctx, FusedContext) and not ctx.is_first  # its inputs belong to the graph of the first
        is_audited = not is_inner and self._audit.is_due()
        if self._has_wgrad and torch.is_grad_enabled():
            outputs = self._run_deferring(ctx, inputs, is_audited=is_audited)
        elif is_audited or caller_frees_input(ctx):
            outputs = self._run(ctx, inputs, is_audited=is_audited)
        else:
            outputs = self.forward(ctx, *inputs)
        if not isinstance(outputs, Tensor | tuple):
            found = "None" if outputs is None else type(outputs).__name__
            raise NodeStateError(f"{type(self).__name__}.forward returned {found}; return a tensor or a tuple of them")
        if self._reads or self._writes:
            self._check_handoffs(ctx)
        return owned(outputs) if caller_frees_output(ctx) else outputs

    @final
    def wgrad_store(self, ctx: NodeContext) -> WgradStore | None:
        """The store in which this node's forward may defer weight gradients of its own in the microbatch ``ctx``; None
        where nothing is deferred."""
        store: WgradStore | None = ctx.layer_state.__dict__.get(_STORE)
        return store

    @final
    def defer_wgrads(self) -> None:
        """Defer weight gradients from now on; for the plan that the node is built into.

        Raises:
            NodeStateError: ``deferred_parameters()`` names one that no module of ``modules()`` holds.
        """
        self._has_wgrad = True
        own = {id(parameter) for parameter in self.own_deferred_parameters()}
        wanted = {id(parameter) for parameter in self.deferred_parameters() if parameter.requires_grad} - own
        sites = {
            (id(owner), name): Site(owner, name, parameter)
            for module in self.modules()
            for owner in module.modules()
            for name, parameter in owner._parameters.items()
            if parameter is not None and id(parameter) in wanted
        }
        self._wgrad_sites = tuple(sites.values())
        missing = wanted - {id(site.parameter) for site in self._wgrad_sites}
        if missing:
            raise NodeStateError(
                f"{type(self).__name__}.deferred_parameters() names {len(missing)} that no module of modules() holds; "
                f"let modules() return the modules that hold them"
            )

    @property
    def wgrad_parameters(self) -> tuple[Parameter, ...]:
        """The parameters whose gradients come with ``W``; empty where the node has no ``W`` step."""
        own = [p for p in self.own_deferred_parameters() if p.requires_grad] if self._has_wgrad else []
        return tuple({id(p): p for p in (*own, *self._stored_parameters())}.values())

    @final
    def new_hook(self) -> WgradHook | None:
        """The hook of one microbatch: ``wgrad_hook()``, and the store of what this node defers."""
        own = self.wgrad_hook()
        if not self._wgrad_sites:
            return own
        return StoreHook(self, () if own is None else (own,), dict.fromkeys(self._stored_parameters()))

    def _stored_parameters(self) -> list[Parameter]:
        return [current for site in self._wgrad_sites if (current := site.current) is not None]

    def _cut(self, ctx: NodeContext, name: str, value: Tensor) -> Tensor:
        """What is handed over in the place of a tensor."""
        caller = ctx.outer if isinstance(ctx, FusedContext) else ctx
        if caller_frees_input(caller) and not self.keeps_input():
            value = own(value)  # it may be an input, whose storage the caller will free
        if isinstance(ctx, FusedContext) and name in ctx.internal:
            return value  # a cut would lose its gradient: both sides go backward at once
        if not value.requires_grad:
            return value.detach()  # a tensor of its own, so that counting holders sees that its storage is in use
        detached = ctx.detach(value)
        note_written(ctx, name, value, detached)
        return detached

    def _run(self, ctx: NodeContext, inputs: tuple[Tensor, ...], *, is_audited: bool) -> Tensor | tuple[Tensor, ...]:
        forward = on_copies(self.forward) if caller_frees_input(ctx) and self.keeps_input() else self.forward
        if is_audited:
            return self._audit.run(self, forward, ctx, inputs)
        return forward(ctx, *inputs)

    def _run_deferring(
        self, ctx: NodeContext, inputs: tuple[Tensor, ...], *, is_audited: bool
    ) -> Tensor | tuple[Tensor, ...]:
        hook = find_hook(ctx.outer if isinstance(ctx, FusedContext) else ctx, self)
        if hook is None or not self._wgrad_sites:
            return self._run(ctx, inputs, is_audited=is_audited)
        store = hook.new_store()
        state = ctx.layer_state.__dict__
        state[_STORE] = store
        try:
            sites = self._wgrad_sites
            with store.standing_in(sites), deferring_parallel_linears(sites, store), deferring_products(store):
                return self._run(ctx, inputs, is_audited=is_audited)
        finally:
            del state[_STORE]

    def _narrow(self, absent: frozenset[str]) -> None:
        """Drop the handoffs that do not exist for this node's layer (a dense layer has no dispatch)."""
        self._reads = {name: kind for name, kind in self.reads.items() if name not in absent}
        self._writes = {name: kind for name, kind in self.writes.items() if name not in absent}

    def _check_handoffs(self, ctx: NodeContext) -> None:
        handoffs = handoffs_of(ctx.layer_state)
        untaken = handoffs.untaken(self._reads)
        unwritten = handoffs.unwritten(self._writes)
        if untaken or unwritten:
            found = "left untaken" if untaken else "not written"
            raise NodeStateError(
                f"{type(self).__name__}.forward returned with declared handoffs {found}: "
                f"{', '.join(untaken or unwritten)}; take and put each declared handoff in every forward, "
                f"or call super().forward, which does"
            )
