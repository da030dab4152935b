"""Freeing a tensor's storage early, on proof that nobody else uses it.

Contract: ``release_inputs`` empties the storage that a slot's input (``inner``) shares with the output it came from
(``outer``), and only when every holder of that storage is known:

    the storage      is held by ``outer``, ``inner`` and the handle through which we look: 3
    ``outer``        is held by its Python object only: 1 (2: the producer's autograd saved it)
    ``inner``        is held by its Python object, and by its accumulation node where it requires grad: 1 or 2
    Python's ``inner`` is referenced by the sequence of the slot's inputs and nothing else: an output that is the input
                     itself, an ``autograd.Function`` that keeps it as an attribute, a node that remembers it
    Python's ``outer`` the same, where the sequence of outputs is ours: a node or a hook that remembers what it returned

An ``outer`` or ``inner`` that is a view has a base, which holds the storage too: one more for each, where that view and
nothing else holds the base (the result of a ``contiguous()`` seen in another shape, say).

Anything else - another view, a saved input or output, a buffer that is global to the process - shows up as one more
holder, and then the storage is kept, as it is where torch has no such counter. Which names a node has, or which
dispatcher a layer has, plays no part.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from layernodes.lane import Lane, empty_storage

_LOOKING: Final = 1  # the handle through which a storage's holders are counted


# How many references looking at an item of a sequence adds; it differs between versions of Python.
_LONE: Final = [object()]
_LOOKING_AT_ITEM: Final = sys.getrefcount(_LONE[0]) - 1


def num_storage_holders(tensor: Tensor) -> int:
    """How many tensors (saved ones included) hold the storage of ``tensor``."""
    storage = tensor.untyped_storage()
    return int(torch._C._storage_Use_Count(storage._cdata)) - _LOOKING


def num_tensor_holders(tensor: Tensor) -> int:
    """How many owners (its Python object, autograd's saved variables, an accumulation node) hold this very tensor."""
    return int(tensor._use_count())  # type: ignore[attr-defined]  # a C++ method that torch's stubs leave out


def is_sole_holder(tensor: Tensor) -> bool:
    """Whether nothing but the caller's reference keeps ``tensor`` or its storage; False where nobody can tell."""
    return _has_counters() and num_storage_holders(tensor) == 1 and num_tensor_holders(tensor) == 1


@functools.cache
def _has_counters() -> bool:
    """Whether this torch counts the holders of storages and tensors; both counters are private to it."""
    tensor = torch.empty(1)
    try:
        return num_storage_holders(tensor) > 0 and num_tensor_holders(tensor) > 0
    except AttributeError:
        return False


def may_release(outer: Tensor, inner: Tensor) -> bool:
    """Whether the storage shared by ``outer`` (an output) and ``inner`` (its detached copy) has no other user.

    Call it after the forward that consumed ``inner``, while both are alive. What it cannot see is a further reference
    of Python to the very objects ``outer`` and ``inner``; ``release_inputs`` sees those to ``inner``, and
    those to ``outer`` where it owns it.
    """
    if not _has_counters() or outer.data_ptr() != inner.data_ptr():
        return False
    most = 2 if inner.requires_grad else 1  # an input that the slot did not use has no accumulation node
    views = [tensor for tensor in (outer, inner) if tensor._is_view()]
    return (
        num_tensor_holders(outer) == 1
        and num_tensor_holders(inner) <= most
        and num_storage_holders(outer) == 2 + len(views)
        and all(map(_is_all_of_its_base, views))
    )


def _is_all_of_its_base(view: Tensor) -> bool:
    """Whether a view is all that holds its base: neither autograd, nor Python, nor another view does."""
    base = view._base
    assert base is not None
    return num_tensor_holders(base) == 2 and sys.getrefcount(base) == _references_of_base()


@functools.cache
def _references_of_base() -> int:
    """How many references Python counts to the base of one view, looked at through a variable."""
    view = torch.empty(2).view(1, 2)
    base = view._base
    assert base is not None
    return sys.getrefcount(base)


def release_inputs(
    outers: Sequence[object], inners: Sequence[object], lane: Lane | None = None, *, owns_outers: bool = False
) -> int:
    """Empty the storage of each input of a slot where that is proved safe; tells how many were emptied.

    Args:
        outers: the outputs of the slot before.
        inners: the slot's detached inputs, which share their storages; the only sequence that holds them.
        lane: the lane whose work may still be reading the inputs; None on a CPU.
        owns_outers: whether ``outers`` alone should hold these objects, so that whoever else does keeps them. Otherwise
            whoever refers to them, as the variables of Megatron-Core's plan do, must expect them to be emptied.
    """
    num_released = 0
    for i in range(len(outers)):  # no variable holds an output while the references to it are counted
        if owns_outers and sys.getrefcount(outers[i]) - _LOOKING_AT_ITEM > 1:
            continue
        outer = outers[i]
        if isinstance(outer, Tensor) and _may_release_input(outer, inners, i):
            if lane is None:
                empty_storage(outer)
            else:
                lane.releases(outer)
            num_released += 1
    return num_released


def _may_release_input(outer: Tensor, inners: Sequence[object], i: int) -> bool:
    inner = inners[i]
    if not isinstance(inner, Tensor) or not may_release(outer, inner):
        return False
    expected = _references_of_leaf() if num_tensor_holders(inner) > 1 else 1
    del inner  # one reference fewer to account for
    return sys.getrefcount(inners[i]) - _LOOKING_AT_ITEM == expected


@functools.cache
def _references_of_leaf() -> int:
    """How many references Python counts to a tensor in a sequence once an accumulation node holds it too.

    Some versions of torch keep the Python object alive by one reference of their own while C++ holds the tensor.
    """
    with torch.enable_grad():
        leaf = [torch.empty(0, requires_grad=True)]
        edge = get_gradient_edge(leaf[0])
    references = sys.getrefcount(leaf[0]) - _LOOKING_AT_ITEM
    del edge
    return references
