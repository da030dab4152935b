"""A node that does next to nothing, so that what is measured is what surrounds it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from layernodes import ScheduleNode, Slot, StreamType


class TrivialNode(ScheduleNode):
    """Doubles its input."""

    slot = Slot.MLP
    stream = StreamType.COMPUTE

    def __init__(self, layer: torch.nn.Module) -> None:
        pass

    def forward(self, ctx: Any, *inputs: Tensor) -> Tensor:
        return inputs[0] * 2.0

    def touches_rng(self) -> bool:
        return False
