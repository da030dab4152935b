"""What layers of one chunk hand to each other within one microbatch, beside the hidden states.

It hangs on the chunk state of the microbatch, so nothing of it is shared between microbatches.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from torch import Tensor

from layernodes._megatron.calls import ModuleCall
from layernodes.state import carried

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


@dataclass
class ChunkProgress:
    """Calls in progress and the MTP chain of one chunk and microbatch."""

    decoder_call: ModuleCall | None = None
    mtp_call: ModuleCall | None = None
    mtp: MTPChain | None = None


def progress_of(chunk_state: Any) -> ChunkProgress:
    """The progress that ``chunk_state`` carries, made on first use."""
    return carried(chunk_state, _ATTRIBUTE, ChunkProgress)
