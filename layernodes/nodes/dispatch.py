"""The dispatch slot: tokens travel to the ranks of their experts."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from layernodes._megatron.layer_pass import LayerPass
from layernodes.nodes.layer_node import LayerNode
from layernodes.slots import Slot, StreamType
from layernodes.state import HandoffMap, NodeContext


class DispatchNode(LayerNode):
    """The dispatch all-to-all.

    ======= =====================================================================================================
    slot    ``moe_dispatch``
    stream  communication
    input   tokens ``[tokens, h]`` and probs, from the slot before
    output  the tokens that this rank's experts work on, ``[received tokens, h]``
    reads   ``pass_to_dispatch``
    writes  ``dispatched_probs`` (a handoff, since the activation's backward needs it), ``pass_to_mlp``
    frees   its inputs: an exchange saves neither
    wgrad   nothing
    ======= =====================================================================================================

    Mirrors ``MoELayer.dispatch``.
    """

    slot = Slot.MOE_DISPATCH
    stream = StreamType.COMM
    reads: ClassVar[HandoffMap] = {"pass_to_dispatch": LayerPass}
    writes: ClassVar[HandoffMap] = {"dispatched_probs": Tensor, "pass_to_mlp": LayerPass}

    def forward(self, ctx: NodeContext, *inputs: Tensor) -> Tensor | tuple[Tensor, ...]:
        tokens, probs = inputs
        layer_pass = self.take(ctx, "pass_to_dispatch")
        assert isinstance(layer_pass, LayerPass)
        tokens, probs = self._parts.dispatch(layer_pass, tokens, probs)
        self.put(ctx, "dispatched_probs", probs)
        self.put(ctx, "pass_to_mlp", layer_pass)
        return tokens

    def frees_input(self) -> bool:
        return True

    def keeps_input(self) -> bool:
        return type(self) is not DispatchNode
