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

import inspect
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import ClassVar, Final, Protocol, cast, final

from torch import Tensor
from torch.nn import Module, Parameter

from layernodes._megatron.caller import caller_frees_input, caller_frees_output
from layernodes.errors import NodeDefinitionError, NodeStateError
from layernodes.nodes.edges import EdgeAudit
from layernodes.release import is_sole_holder
from layernodes.slots import ExtraSlot, Slot, StreamType
from layernodes.state import FusedContext, HandoffMap, NodeContext, fits, handoffs_of, spelling

_VERBS: Final = ("put", "take", "__call__")


class WgradHook(Protocol):
    """Computes the weight gradients that one node deferred in one microbatch."""

    def backward_dw(self) -> None:
        """Compute and accumulate them."""
        ...

    def parameters(self) -> Iterable[Parameter]:
        """The parameters whose gradients ``backward_dw`` delivers."""
        ...


class ScheduleNode(ABC):
    """One slot of one layer.

    Subclasses declare ``slot`` and ``stream`` (inherited where a base has them) and, where they exchange more than the
    slot's inputs and outputs, ``reads`` and ``writes``. They override ``forward``, and may override ``wgrad_hook`` and
    ``frees_input``. ``put``, ``take`` and ``__call__`` are final.

    Raises:
        NodeDefinitionError: at class definition, for a missing or wrong declaration.
    """

    slot: ClassVar[Slot | ExtraSlot]
    stream: ClassVar[StreamType]
    reads: ClassVar[HandoffMap] = {}
    writes: ClassVar[HandoffMap] = {}

    _reads: HandoffMap
    _writes: HandoffMap
    _audit: EdgeAudit

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        _check_definition(cls)

    def __new__(cls, *args: object, **kwargs: object) -> ScheduleNode:
        """Bind the declarations, so that a subclass need not call ``super().__init__`` for the verbs to work."""
        node = super().__new__(cls)
        node._reads = cls.reads
        node._writes = cls.writes
        node._audit = EdgeAudit()
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
        caller = ctx.outer if isinstance(ctx, FusedContext) else ctx
        if isinstance(value, Tensor) and caller_frees_input(caller) and not self.keeps_input():
            value = _own(value)  # it may be an input, whose storage the caller will free
        if isinstance(ctx, FusedContext) and name in ctx.internal:
            pass  # a cut would lose its gradient: both sides go backward at once
        elif isinstance(value, Tensor) and value.requires_grad:
            original, value = value, ctx.detach(value)
            self._audit.wrote(name, original, value)
        elif isinstance(value, Tensor):
            value = value.detach()  # a tensor of its own, so that counting holders sees that its storage is in use
        handoffs_of(ctx.layer_state).write(name, value)

    @final
    def take(self, ctx: NodeContext, name: str) -> object:
        """Take a handoff that an earlier slot of the layer left.

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
        self._audit.took(value)
        return value

    @final
    def __call__(self, ctx: NodeContext, *inputs: Tensor) -> Tensor | tuple[Tensor, ...]:
        """Run ``forward`` and hold it to the node's declarations; this is what a scheduler calls."""
        is_inner = isinstance(ctx, FusedContext) and not ctx.is_first
        if caller_frees_input(ctx) and self.keeps_input():
            inputs = copied(inputs)
        if self._audit.is_due() and not is_inner:
            outputs = self._audit.run(self, ctx, inputs)
        else:
            outputs = self.forward(ctx, *inputs)
        self._check_handoffs(ctx)
        return owned(outputs) if caller_frees_output(ctx) else outputs

    def _narrow(self, absent: frozenset[str]) -> None:
        """Drop the handoffs that do not exist for this node's layer (a dense layer has no dispatch)."""
        self._reads = {name: kind for name, kind in self.reads.items() if name not in absent}
        self._writes = {name: kind for name, kind in self.writes.items() if name not in absent}

    def _check_handoffs(self, ctx: NodeContext) -> None:
        handoffs = handoffs_of(ctx.layer_state)
        untaken = [name for name in self._reads if name in handoffs.pending()] if self._reads else ()
        unwritten = [name for name in self._writes if not handoffs.was_written(name)] if self._writes else ()
        if untaken or unwritten:
            found = "left untaken" if untaken else "not written"
            raise NodeStateError(
                f"{type(self).__name__}.forward returned with declared handoffs {found}: "
                f"{', '.join(untaken or unwritten)}; take and put each declared handoff in every forward, "
                f"or call super().forward, which does"
            )


def copied(inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Copies of the tensors among the inputs."""
    return tuple(t.clone() if isinstance(t, Tensor) else t for t in inputs)


def owned(outputs: Tensor | tuple[Tensor, ...]) -> Tensor | tuple[Tensor, ...]:
    """The outputs, each with a storage that nobody else uses."""
    if isinstance(outputs, tuple):
        return tuple(_own(t) for t in outputs)
    return _own(outputs)


def _own(tensor: Tensor) -> Tensor:
    return tensor.clone() if isinstance(tensor, Tensor) and not is_sole_holder(tensor) else tensor


def _check_definition(cls: type[ScheduleNode]) -> None:
    name = f"{cls.__name__}({', '.join(base.__name__ for base in cls.__bases__)})"
    for verb in _VERBS:
        if verb in cls.__dict__:
            raise NodeDefinitionError(
                f"{name} overrides {verb!r}, which is final; override 'forward', or wrap the node to run code around it"
            )
    if _is_abstract(cls):
        return
    slot = cls.__dict__.get("slot", getattr(cls, "slot", None))
    if not isinstance(slot, Slot | ExtraSlot):
        found = "declares no 'slot'" if slot is None else f"declares slot = {slot!r}"
        raise NodeDefinitionError(f"{name} {found}; declare one of {', '.join(f'Slot.{s.name}' for s in Slot)}")
    stream = getattr(cls, "stream", None)
    if not isinstance(stream, StreamType):
        found = "declares no 'stream'" if stream is None else f"declares stream = {stream!r}"
        raise NodeDefinitionError(f"{name} {found}; declare StreamType.COMPUTE or StreamType.COMM")
    for attribute in ("reads", "writes"):
        _check_handoff_map(name, attribute, getattr(cls, attribute))
    both = set(cls.reads) & set(cls.writes)
    if both:
        raise NodeDefinitionError(
            f"{name} declares {', '.join(sorted(both))} in both 'reads' and 'writes'; a handoff is written once: "
            f"write it on under a new name"
        )
    _check_forward(name, cls)


def _check_handoff_map(name: str, attribute: str, declared: object) -> None:
    if not isinstance(declared, Mapping):
        raise NodeDefinitionError(
            f"{name} declares {attribute} = {declared!r}; declare a mapping from handoff name to type, "
            f"e.g. {attribute} = {{'gate_scores': Tensor}}"
        )
    for key, kind in declared.items():
        try:
            isinstance(None, kind)
        except TypeError:
            valid = False
        else:
            valid = isinstance(key, str)
        if not valid:
            raise NodeDefinitionError(
                f"{name} declares {attribute} {key!r}: {kind!r}; declare a name and a type, e.g. 'gate_scores': Tensor"
            )


def _check_forward(name: str, cls: type[ScheduleNode]) -> None:
    kinds = [p.kind for p in inspect.signature(cls.forward).parameters.values()]
    positional = [k for k in kinds if k in (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)]
    if len(positional) < 2 and inspect.Parameter.VAR_POSITIONAL not in kinds:
        raise NodeDefinitionError(
            f"{name}.forward takes {inspect.signature(cls.forward)}; declare forward(self, ctx, *inputs)"
        )


def _is_abstract(cls: type) -> bool:
    return any(
        getattr(cast(object, getattr(cls, attribute, None)), "__isabstractmethod__", False) for attribute in dir(cls)
    )
