"""Copies for callers that free storage without proof that nobody uses it, as Megatron-Core's own node class does."""

from __future__ import annotations

from torch import Tensor

from layernodes.nodes.edges import Forward
from layernodes.release import is_sole_holder
from layernodes.state import NodeContext


def on_copies(forward: Forward) -> Forward:
    """``forward``, given copies of its inputs."""

    def run(ctx: NodeContext, *inputs: Tensor) -> Tensor | tuple[Tensor, ...]:
        return forward(ctx, *copied(inputs))

    return run


def copied(inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Copies of the tensors among the inputs."""
    return tuple(t.clone() if isinstance(t, Tensor) else t for t in inputs)


def owned(outputs: Tensor | tuple[Tensor, ...]) -> Tensor | tuple[Tensor, ...]:
    """The outputs, each with a storage that nobody else uses."""
    if isinstance(outputs, tuple):
        return tuple(own(t) for t in outputs)
    return own(outputs)


def own(tensor: Tensor) -> Tensor:
    """The tensor, or a copy of it where somebody else uses its storage."""
    return tensor.clone() if isinstance(tensor, Tensor) and not is_sole_holder(tensor) else tensor
