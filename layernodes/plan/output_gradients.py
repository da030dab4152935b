"""The gradients that a chunk's backward begins with, one for each of its outputs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from layernodes.errors import NodeStateError
from layernodes.plan.slot_run import Values


def gradients_of(output: Any, gradient: Any) -> Values:
    """A gradient for each output of a chunk: those given, or ones where ``gradient`` is None.

    Raises:
        NodeStateError: there are more or fewer gradients than outputs, one has another shape than its output, or no
            output is a tensor.
    """
    outputs = output if isinstance(output, tuple) else (output,)
    if not any(isinstance(t, Tensor) for t in outputs):
        raise NodeStateError(
            f"the chunk returned a {type(output).__name__}, from which no backward can begin; return a tensor, or a "
            f"tuple of tensors"
        )
    if gradient is None:
        return tuple(
            torch.ones_like(t) if isinstance(t, Tensor) and (t.is_floating_point() or t.is_complex()) else None
            for t in outputs
        )
    gradients: Values = gradient if isinstance(gradient, tuple) else (gradient,)
    if len(outputs) != len(gradients):
        raise NodeStateError(
            f"the last slot returned {len(outputs)} values, and the gradients given are {len(gradients)}; return one "
            f"tensor, or give a tuple with a gradient for each"
        )
    for one, its in zip(outputs, gradients, strict=True):
        # Autograd's engine would sum a gradient of a larger shape, and expand one of a smaller.
        if isinstance(one, Tensor) and isinstance(its, Tensor) and one.shape != its.shape:
            raise NodeStateError(
                f"the last slot returned a tensor of shape {tuple(one.shape)}, and the gradient given for it has shape "
                f"{tuple(its.shape)}; give one of the output's shape"
            )
    return gradients
