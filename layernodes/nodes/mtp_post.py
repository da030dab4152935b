"""The slot after a multi-token-prediction layer."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from torch import Tensor

from layernodes.errors import UnsupportedLayerError
from layernodes.nodes.layer_node import LayerNode
from layernodes.nodes.mtp_handoffs import MTP_HANDOFFS, leave_layer
from layernodes.slots import Slot, StreamType
from layernodes.state import HandoffMap, NodeContext

if TYPE_CHECKING:
    from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionLayer


class MTPPostNode(LayerNode):
    """The MTP layer's own norm; appends its output to the depths before. Absent outside MTP.

    ======= =====================================================================================================
    slot    ``mtp_post_process``
    stream  compute
    input   the inner layer's output ``[s, b, h]``
    output  the hidden states of all depths so far, ``[(1 + depth) * s, b, h]``
    reads   ``mtp_depths``, ``mtp_latest``, ``mtp_call``
    frees   nothing
    wgrad   nothing
    ======= =====================================================================================================

    Mirrors ``MultiTokenPredictionLayer._postprocess`` and the end of ``MultiTokenPredictionBlock.forward``.

    Raises:
        UnsupportedLayerError: a layer that is no ``MultiTokenPredictionLayer``, or not handled.
    """

    slot = Slot.MTP_POST_PROCESS
    stream = StreamType.COMPUTE
    reads: ClassVar[HandoffMap] = MTP_HANDOFFS

    def __init__(self, layer: MultiTokenPredictionLayer) -> None:
        super().__init__(layer)
        if self._parts.mtp is None:
            raise UnsupportedLayerError(
                f"MTPPostNode needs a MultiTokenPredictionLayer, found {type(layer).__name__}; "
                f"leave Slot.MTP_POST_PROCESS out for other layers",
                field="layer",
                value=type(layer),
            )

    def forward(self, ctx: NodeContext, *inputs: Tensor) -> Tensor | tuple[Tensor, ...]:
        (hidden,) = inputs
        assert self._parts.mtp is not None
        return leave_layer(self, ctx, self._parts.mtp, hidden)
