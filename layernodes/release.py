"""Freeing a tensor's storage early, on proof that nobody else uses it.

Contract: ``release_inputs`` empties the storage that a slot's input (``inner``) shares with the output it came from
(``outer``), and only when every holder of that storage is known:

    the storage      is held by ``outer``, ``inner`` and the handle through which we look: 3
    ``outer``        is held by its Python object only: 1 (2: the producer's autograd saved it)
    ``inner``        is held by its Python object, and by its accumulation node where it requires grad: 1 or 2

Anything else - a view, a saved input or output, a buffer that is global to the process - shows up as one more holder,
and then the storage is kept. Which names a node has, or which dispatcher a layer has, plays no part.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_LOOKING = 1  # the handle through which a storage's holders are counted


def num_storage_holders(tensor: Tensor) -> int:
    """How many tensors (saved ones included) hold the storage of ``tensor``."""
    storage = tensor.untyped_storage()
    return int(torch._C._storage_Use_Count(storage._cdata)) - _LOOKING


def num_tensor_holders(tensor: Tensor) -> int:
    """How many owners (its Python object, autograd's saved variables, an accumulation node) hold this very tensor."""
    return int(tensor._use_count())  # type: ignore[attr-defined]


def is_sole_holder(tensor: Tensor) -> bool:
    """Whether nothing but the caller's reference keeps ``tensor`` or its storage."""
    return num_storage_holders(tensor) == 1 and num_tensor_holders(tensor) == 1


def may_release(outer: Tensor, inner: Tensor) -> bool:
    """Whether the storage shared by ``outer`` (an output) and ``inner`` (its detached copy) has no other user.

    Call it after the forward that consumed ``inner``, while both are alive. What it cannot see is a further reference
    to
    the very objects ``outer`` and ``inner``: those are the caller's to know.
    """
    if outer.data_ptr() != inner.data_ptr():
        return False
    most = 2 if inner.requires_grad else 1  # an input that the slot did not use has no accumulation node
    return num_storage_holders(outer) == 2 and num_tensor_holders(outer) == 1 and num_tensor_holders(inner) <= most


def release_inputs(
    outers: Sequence[object],
    inners: Sequence[object],
    outputs: Sequence[object],
    stream: torch.Stream | None = None,
) -> int:
    """Empty the storage of each input of a slot where that is proved safe; tells how many were emptied.

    Args:
        outers: the outputs of the slot before.
        inners: the slot's detached inputs, which share their storages.
        outputs: what the slot returned; an input returned as it is stays.
        stream: the accelerator stream that may still be reading the inputs; None on a CPU.
    """
    returned = {id(output) for output in outputs}
    num_released = 0
    for outer, inner in zip(outers, inners, strict=True):
        if not isinstance(outer, Tensor) or not isinstance(inner, Tensor) or id(inner) in returned:
            continue
        if may_release(outer, inner):
            if stream is not None:
                outer.record_stream(stream)
            outer.untyped_storage().resize_(0)
            num_released += 1
    return num_released
