"""The closed sets of the field: slots, streams and phases, each spelt as Megatron-Core spells it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, StrEnum
from typing import Final


class Slot(StrEnum):
    """One of the parts of a layer, in forward order.

    The first five are Megatron-Core's (``TransformerLayerSchedulePlan``); ``POST_COMBINE`` exists only in plans
    and shapes built with ``split_combine=True``, where it stands between ``MOE_COMBINE`` and ``MTP_POST_PROCESS``.
    """

    PRE_DISPATCH_COMPUTATION = "pre_dispatch_computation"
    MOE_DISPATCH = "moe_dispatch"
    MLP = "mlp"
    MOE_COMBINE = "moe_combine"
    POST_COMBINE = "post_combine"
    MTP_POST_PROCESS = "mtp_post_process"


MEGATRON_SLOTS: Final[tuple[Slot, ...]] = (
    Slot.PRE_DISPATCH_COMPUTATION,
    Slot.MOE_DISPATCH,
    Slot.MLP,
    Slot.MOE_COMBINE,
    Slot.MTP_POST_PROCESS,
)
"""The five slots of Megatron-Core's five-callable tuple, in its order."""


class StreamType(Enum):
    """The stream on which a node runs."""

    COMPUTE = "compute"
    COMM = "comm"


class Phase(StrEnum):
    """What a step does with its slot: forward, backward (input gradients), or deferred weight gradients."""

    F = "F"
    B = "B"
    W = "W"


@dataclass(frozen=True, kw_only=True)
class ExtraSlot:
    """A slot of a user's own, run right after one of the layer's slots.

    It is part of a shape and has steps of its own; in the tuple of five callables it is fused into its predecessor.

    Attributes:
        name: its text in steps; an identifier that is no ``Slot`` value.
        after: the slot that it follows.
    """

    name: str
    after: Slot
