"""A node that is wrong on purpose; ``python -m tests.demo.faults`` is the demo with it on the last rank only."""

from __future__ import annotations

import functools
import os
import sys
from typing import Any

from torch import Tensor
from torch.nn import Module

from layernodes import CombineNode, LayerPlan, Slot
from layernodes.cli import main
from layernodes.demo import command
from layernodes.demo.run import demonstrate


class ScaledCombineNode(CombineNode):
    """A thousandth too much."""

    def forward(self, ctx: Any, *inputs: Tensor) -> Any:
        return super().forward(ctx, *inputs) * 1.001


def build_scaled(layer: Module) -> LayerPlan:
    """A plan of a MoE layer with the wrong node in it."""
    return LayerPlan.build(layer, nodes={Slot.MOE_COMBINE: ScaledCombineNode})


if __name__ == "__main__":
    if os.environ["RANK"] != "0":
        command.demonstrate = functools.partial(demonstrate, build=build_scaled)  # type: ignore[attr-defined]
    sys.exit(main(["demo", *sys.argv[1:]]))
