"""What one microbatch carries from slot to slot of a layer: named, typed, written once, taken once.

Megatron-Core shares an empty object per layer and microbatch (``LayerState``) on which any slot may set and read any
attribute. Here the same object carries one ``Handoffs``, and nothing else of ours.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from types import UnionType
from typing import Protocol, final, runtime_checkable

from torch import Tensor

from layernodes.errors import NodeStateError

HandoffType = type | UnionType
"""What a handoff may be declared as: a class, or a union such as ``Tensor | None``."""

_HANDOFFS = "layernodes_handoffs"


@runtime_checkable
class NodeContext(Protocol):
    """What a node is given of the microbatch it works on.

    Megatron-Core's ``TransformerLayerNode`` satisfies it, so one node object serves Megatron's scheduler and ours.

    Attributes:
        layer_state: an object private to this layer and microbatch; it carries the handoffs.
        chunk_state: an object private to this chunk and microbatch, with the inputs of ``model.forward`` as attributes.
        is_first_layer: whether the layer is the first of its block (decoder or MTP) in this chunk.
        is_last_layer: whether it is the last.
        is_mtp: whether it is a multi-token-prediction layer.
    """

    layer_state: object
    chunk_state: object
    is_first_layer: bool
    is_last_layer: bool
    is_mtp: bool

    def detach(self, t: Tensor) -> Tensor:
        """Cut ``t`` from the graph and remember the pair, so that backward hands the cut tensor's gradient to ``t``."""
        ...


@final
class FusedContext:
    """The context of one of several nodes that a caller runs as one.

    Attributes:
        outer: the caller's own context; attributes and ``detach`` are its.
        internal: handoffs that one of the nodes writes and another takes; they stay in one graph, uncut.
        is_first: whether the node is the first of them, so that its inputs are the caller's.
    """

    __slots__ = (
        "chunk_state",
        "internal",
        "is_first",
        "is_first_layer",
        "is_last_layer",
        "is_mtp",
        "layer_state",
        "outer",
    )

    def __init__(self, outer: NodeContext, internal: frozenset[str], *, is_first: bool) -> None:
        self.outer = outer
        self.internal = internal
        self.is_first = is_first
        self.layer_state = outer.layer_state
        self.chunk_state = outer.chunk_state
        self.is_first_layer = outer.is_first_layer
        self.is_last_layer = outer.is_last_layer
        self.is_mtp = outer.is_mtp

    def detach(self, t: Tensor) -> Tensor:
        """See ``NodeContext.detach``."""
        return self.outer.detach(t)


@final
class Handoffs:
    """The handoffs of one layer and microbatch: each is written once and taken once."""

    __slots__ = ("_spent", "_values")

    def __init__(self) -> None:
        self._values: dict[str, object] = {}
        self._spent: set[str] = set()

    def write(self, name: str, value: object) -> None:
        """Leave ``value`` under ``name``; NodeStateError if that name has been written before."""
        if name in self._values or name in self._spent:
            raise NodeStateError(
                f"handoff {name!r} is written a second time for this layer and microbatch; each is written once: "
                f"give the second one a name of its own, or take the first one before running the layer again"
            )
        self._values[name] = value

    def take(self, name: str) -> object:
        """Return and forget what was left under ``name``; NodeStateError if it is not there."""
        try:
            value = self._values.pop(name)
        except KeyError:
            state = (
                "has already been taken; each is taken once"
                if name in self._spent
                else "has not been written yet; run the slot that writes it first"
            )
            raise NodeStateError(
                f"handoff {name!r} {state} (waiting to be taken: {sorted(self._values) or 'nothing'})"
            ) from None
        self._spent.add(name)
        return value

    def waiting(self, names: Iterable[str]) -> list[object]:
        """The values of those of ``names`` that wait to be taken."""
        return [self._values[name] for name in names if name in self._values]

    def pending(self) -> tuple[str, ...]:
        """Names written and not yet taken."""
        return tuple(self._values)

    def untaken(self, names: Iterable[str]) -> list[str]:
        """Those of ``names`` that are written and not yet taken."""
        return [name for name in names if name in self._values]

    def unwritten(self, names: Iterable[str]) -> list[str]:
        """Those of ``names`` that were never written, taken since or not."""
        return [name for name in names if name not in self._values and name not in self._spent]


def handoffs_of(state: object) -> Handoffs:
    """The handoffs that ``state`` carries, made on first use."""
    return carried(state, _HANDOFFS, Handoffs)


def carried[T](state: object, name: str, make: Callable[[], T]) -> T:
    """What a layer's or chunk's state of one microbatch carries under ``name``, made on first use."""
    try:
        value: T = state.__dict__[name]
    except KeyError:
        value = make()
        setattr(state, name, value)
    return value


def fits(value: object, declared: HandoffType) -> bool:
    """Whether ``value`` is what was declared; a ``Tensor | None`` declaration admits None."""
    return isinstance(value, declared)


def spelling(declared: HandoffType) -> str:
    """How a declared type is written in messages and descriptions."""
    return declared.__name__ if isinstance(declared, type) else str(declared)


HandoffMap = Mapping[str, HandoffType]
"""Declared handoffs: name to type."""
