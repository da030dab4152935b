"""What a microbatch's chunk begins with where it does not embed tokens itself, and the gradient's way back to it.

A graph may lead to it, such as that of a vision encoder; it goes backward once the chunk has. It may use parameters
that nodes of the chunk share, where the forward step embeds the tokens. Plain autograd gives these one gradient; so
what the nodes contribute waits:

    forward of the chunk     works on a leaf in its place
    backward of the chunk    keeps complete sums of shared parameters, in place of delivering them
    hand_back                one backward from the tensor and from those parameters, with its gradient and the sums
"""

from __future__ import annotations

from typing import Any, final

from torch import Tensor

from layernodes.autograd import accumulate


@final
class GivenInput:
    """The tensor that was given; None where there is none."""

    def __init__(self, tensor: Tensor | None) -> None:
        self._tensor = tensor
        self._sums: list[tuple[Tensor, Tensor]] = []

    @staticmethod
    def of(model: Any, batch: dict[str, Any]) -> GivenInput:
        """What ``batch`` gives; a chunk without pre-process is first given what the pipeline handed over
        (``set_input_tensor``)."""
        if model.pre_process:
            return GivenInput(batch.get("decoder_input"))
        if model.decoder.input_tensor is not None:
            batch["hidden_states"] = model.decoder.input_tensor
        return GivenInput(batch.get("hidden_states"))

    @property
    def has_graph(self) -> bool:
        """Whether a graph leads to it."""
        return self._tensor is not None and self._tensor.grad_fn is not None

    def keep(self, parameter: Tensor, total: Tensor) -> None:
        """Take the sum of what the chunk's nodes contribute to the gradient of a parameter."""
        self._sums.append((parameter, total))

    def hand_back(self, gradient: Tensor | None) -> None:
        """Deliver the gradient of the tensor, and the sums with it."""
        tensor, sums = self._tensor, self._sums
        self._tensor, self._sums = None, []
        if tensor is not None and gradient is not None:
            sums = [*sums, (tensor, gradient)]
        if sums:
            accumulate([root for root, _ in sums], [total for _, total in sums])
