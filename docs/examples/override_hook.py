"""Change what one slot does: a node class with its own ``forward``, and a parameter.

The first layer's output is halved. Run it: ``python docs/examples/override_hook.py``.
"""

from __future__ import annotations

from typing import Any

from tiny_model import compare, make_model, one_process, run_plainly, run_through_nodes
from torch import Tensor

from layernodes import CombineNode, LayerPlan, NodeContext, Slot


class ScaledCombineNode(CombineNode):
    """Combine, then scale the layer's output by a fixed factor."""

    def __init__(self, layer: Any, *, scale: float) -> None:
        super().__init__(layer)
        self._scale = scale

    def forward(self, ctx: NodeContext, *inputs: Tensor) -> Tensor:
        return super().forward(ctx, *inputs) * self._scale


def build(layer: Any) -> LayerPlan:
    """The first layer's plan has our node in the combine slot; a factory takes the layer and gives the parameter."""
    if layer.layer_number > 1:
        return LayerPlan.build(layer)
    return LayerPlan.build(layer, nodes={Slot.MOE_COMBINE: lambda it: ScaledCombineNode(it, scale=0.5)})


def main() -> None:
    """Run both and compare: the plain model gets the same change by a hook on the layer."""
    with one_process():
        plain, nodes = make_model(), make_model()
        plain.decoder.layers[0].register_forward_hook(lambda _layer, _args, out: (out[0] * 0.5, *out[1:]))
        compare(plain, run_plainly(plain), nodes, run_through_nodes(nodes, build))


if __name__ == "__main__":
    main()
