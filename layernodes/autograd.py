"""The two ends of a slot's own graph: the leaves it begins at, and the call of autograd's engine from its roots."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Variable

_is_any_autocast_enabled = torch._C._is_any_autocast_enabled
_run_engine = Variable._execution_engine.run_backward


def leaf_of(value: Any) -> Any:
    """A tensor cut from its graph, a leaf that requires grad where it did; anything else as it is.

    Autocast keeps the casts of leaves: products that share one hand their gradients on as a sum in its dtype. What is
    cut here is no leaf in the plain layer, which casts it for each. Of a view, autocast keeps none.
    """
    if not isinstance(value, Tensor):
        return value
    leaf = value.detach()
    if value.requires_grad:
        if _is_any_autocast_enabled() and not (value.is_leaf and not value._is_view()):
            leaf = leaf.view_as(leaf)
        leaf.requires_grad_(True)
    return leaf


def roots_among(outputs: Sequence[Any], gradients: Sequence[Any]) -> tuple[list[Tensor], list[Tensor]]:
    """Those outputs that take part in backward, and their gradients: an output that nobody used has None, and one that
    requires no gradient is frozen."""
    roots: list[Tensor] = []
    root_gradients: list[Tensor] = []
    for output, gradient in zip(outputs, gradients, strict=True):
        if gradient is not None and isinstance(output, Tensor) and output.requires_grad:
            roots.append(output)
            root_gradients.append(gradient)
    return roots, root_gradients


def accumulate(roots: Sequence[Tensor], root_gradients: Sequence[Tensor]) -> None:
    """Run autograd from ``roots``; gradients accumulate in the leaves, and the graph is freed."""
    # keep_graph and create_graph off, no inputs
    _run_engine(tuple(roots), tuple(root_gradients), False, False, (), allow_unreachable=True, accumulate_grad=True)
