"""Hand a tensor from one slot to a later one, gradient included.

The first slot computes a gate from the layer's input; the last one multiplies the layer's output by it. The gate's
gradient flows back through the slot that wrote it, into the gate's weight and the layer's input.
Run it: ``python docs/examples/add_handoff.py``.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from tiny_model import compare, make_model, one_process, run_plainly, run_through_nodes
from torch import Tensor

from layernodes import CombineNode, LayerPlan, NodeContext, PreDispatchNode, Slot


class GatePreDispatchNode(PreDispatchNode):
    """Also computes a gate from the layer's input and leaves it for combine."""

    writes: ClassVar = {**PreDispatchNode.writes, "gate": Tensor}

    def __init__(self, layer: Any) -> None:
        super().__init__(layer)
        self._gate = layer.gate

    def forward(self, ctx: NodeContext, *inputs: Tensor) -> Tensor | tuple[Tensor, ...]:
        self.put(ctx, "gate", torch.sigmoid(self._gate(inputs[0])))
        return super().forward(ctx, *inputs)


class GatedCombineNode(CombineNode):
    """Takes the gate and applies it to the layer's output."""

    reads: ClassVar = {**CombineNode.reads, "gate": Tensor}

    def forward(self, ctx: NodeContext, *inputs: Tensor) -> Tensor:
        gate = self.take(ctx, "gate")
        return super().forward(ctx, *inputs) * gate


def build(layer: Any) -> LayerPlan:
    """Both nodes go into the first layer's plan; one without the other would be refused here."""
    if layer.layer_number > 1:
        return LayerPlan.build(layer)
    nodes = {Slot.PRE_DISPATCH_COMPUTATION: GatePreDispatchNode, Slot.MOE_COMBINE: GatedCombineNode}
    return LayerPlan.build(layer, nodes=nodes)


def make_gated_model() -> Any:
    """The tiny model, with a gate on its first layer."""
    model = make_model()
    model.decoder.layers[0].gate = torch.nn.Linear(16, 1)
    return model


def gate_plainly(layer: Any) -> None:
    """The same with hooks on a plain layer: compute the gate before its forward, apply it after."""
    gates: list[Tensor] = []
    layer.register_forward_pre_hook(
        lambda _layer, _args, kwargs: gates.append(torch.sigmoid(layer.gate(kwargs["hidden_states"]))), with_kwargs=True
    )
    layer.register_forward_hook(lambda _layer, _args, out: (out[0] * gates.pop(), *out[1:]))


def main() -> None:
    """Run both and compare."""
    with one_process():
        plain, nodes = make_gated_model(), make_gated_model()
        gate_plainly(plain.decoder.layers[0])
        compare(plain, run_plainly(plain), nodes, run_through_nodes(nodes, build))


if __name__ == "__main__":
    main()
