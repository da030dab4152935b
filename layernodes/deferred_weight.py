"""What contributes to the gradient of one deferred weight, and its delivery as one sum."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import final

import torch
from torch import Tensor
from torch.nn import Parameter

from layernodes.stand_in import PARTS, deliver

Compute = Callable[[], Tensor | None]


@final
class DeferredWeight:
    """One weight of a store: the parameter, its stand-in, and what contributes to its gradient."""

    __slots__ = ("_is_parked", "_parked", "_stand_in", "name", "parameter")

    def __init__(self, name: str, parameter: Parameter, stand_in: Parameter) -> None:
        self.name, self.parameter = name, parameter
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
            self.parameter.grad_added_to_main_grad = True  # type: ignore[attr-defined]  # Megatron-Core's, not torch's
