"""Put a node of your own class into a slot.

The slot of the experts is run by a class that is no ``ExpertNode``: it squashes what the experts return, and leaves the
experts themselves to the library's node, which it wraps. Run it: ``python docs/examples/replace_slot.py``.
"""

from __future__ import annotations

from typing import Any

import torch
from tiny_model import compare, make_model, one_process, run_plainly, run_through_nodes
from torch import Tensor

from layernodes import ExpertNode, LayerPlan, NodeContext, ScheduleNode, Slot, StreamType


class SquashedExpertsNode(ScheduleNode):
    """The experts' output through tanh; declares what the node inside it exchanges with other slots."""

    slot = Slot.MLP
    stream = StreamType.COMPUTE
    reads = ExpertNode.reads
    writes = ExpertNode.writes

    def __init__(self, layer: Any) -> None:
        self._experts = ExpertNode(layer)

    def forward(self, ctx: NodeContext, *inputs: Tensor) -> Tensor:
        return torch.tanh(self._experts(ctx, *inputs))


def build(layer: Any) -> LayerPlan:
    """Our class takes the place of ``ExpertNode`` in every layer."""
    return LayerPlan.build(layer, nodes={Slot.MLP: SquashedExpertsNode})


def squash_plainly(model: Any) -> None:
    """The same on a plain model: a hook on each layer's experts."""
    for layer in model.decoder.layers:
        layer.mlp.experts.register_forward_hook(lambda _experts, _args, out: (torch.tanh(out[0]), *out[1:]))


def main() -> None:
    """Run both and compare."""
    with one_process():
        plain, nodes = make_model(), make_model()
        squash_plainly(plain)
        compare(plain, run_plainly(plain), nodes, run_through_nodes(nodes, build))


if __name__ == "__main__":
    main()
