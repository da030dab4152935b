"""What layers of one chunk hand to each other within one microbatch, beside the hidden states.

It hangs on the chunk state of the microbatch, so nothing of it is shared between microbatches.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Protocol

from torch import Tensor

from layernodes._megatron.calls import ModuleCall
from layernodes.state import NodeContext, carried

_ATTRIBUTE: Final = "layernodes_chunk"


@dataclass(kw_only=True)
class MTPChain:
    """Where the multi-token-prediction layers of a microbatch have got to.

    Attributes:
        depth: number of MTP layers begun.
        input_ids, position_ids, padding_mask: the chunk's own, rolled left once for each MTP layer begun,
            ``[batch, seq]`` (``[1, tokens]`` when packed). The chunk's stay as they are: post-process needs them.
    """

    depth: int
    input_ids: Tensor
    position_ids: Tensor
    padding_mask: Tensor | None


class DecoderCalls(Protocol):
    """How one class of decoder calls its layers, and what its nodes do for it.

    Attributes:
        forks_rng: whether it runs its layers under the model-parallel RNG fork, with sequence parallelism.
        mtp_left_out: what its model does not give to its MTP block, of the arguments that ``GPTModel`` gives.
    """

    forks_rng: bool
    mtp_left_out: frozenset[str]

    def begin(self, chunk: Any, hidden: Tensor) -> Tensor:
        """What the decoder's first layer does before its own work."""
        ...

    def end(self, chunk: Any, hidden: Tensor) -> Tensor:
        """What the decoder's last layer does after its own work."""
        ...

    def layer_arguments(self, ctx: NodeContext, hidden: Tensor) -> dict[str, Any]:
        """The keyword arguments of a ``TransformerLayer``, in the decoder or inside an MTP layer."""
        ...


@dataclass
class ChunkProgress:
    """Calls in progress and the MTP chain of one chunk and microbatch.

    Attributes:
        calls: how the decoder calls its layers; None: as ``TransformerBlock`` does.
        decoder_call, mtp_call, stack_call: calls in progress of the decoder, the MTP block, and the stack inside an MTP
            layer.
        mtp: the chain of MTP layers.
    """

    calls: DecoderCalls | None = None
    decoder_call: ModuleCall | None = None
    mtp_call: ModuleCall | None = None
    stack_call: ModuleCall | None = None
    mtp: MTPChain | None = None


def progress_of(chunk_state: Any) -> ChunkProgress:
    """The progress that ``chunk_state`` carries, made on first use."""
    return carried(chunk_state, _ATTRIBUTE, ChunkProgress)
