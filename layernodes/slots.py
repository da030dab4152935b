"""The closed sets of the field: slots, streams and phases, each spelt as Megatron-Core spells it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum, StrEnum
from typing import Final, final

from layernodes.errors import PlanError


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


PRE_PROCESS: Final = "pre_process"
"""Slot name of the chunk's head (embedding, rotary inputs, masks); its steps have no layer."""

POST_PROCESS: Final = "post_process"
"""Slot name of the chunk's tail (output layer, loss); its steps have no layer."""

CHUNK_ENDS: Final = (PRE_PROCESS, POST_PROCESS)

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_LAYER_LIKE = re.compile(r"L[0-9]+(?![A-Za-z0-9_])")


def is_slot_name(name: str) -> bool:
    """Whether a name may stand as the slot of a step: an ASCII identifier that does not read as a layer."""
    return _NAME.fullmatch(name) is not None and _LAYER_LIKE.fullmatch(name) is None


@final
@dataclass(frozen=True)
class ExtraSlot:
    """A slot of the user's own, directly after another slot of the layer.

    It is part of a shape and has steps of its own; in the tuple of five callables it is fused into its predecessor.

    Attributes:
        name: an identifier that is no slot's name yet.
        after: the slot that it follows: one of ``Slot``, or the name of another extra slot, listed before it or behind.
        stream: the stream on which it runs.

    Raises:
        PlanError: the name is taken or no identifier; ``after`` or ``stream`` is something else.
    """

    name: str
    after: Slot | str
    stream: StreamType = StreamType.COMPUTE

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not is_slot_name(self.name) or self.name in (*Slot, *CHUNK_ENDS):
            raise PlanError(f"{self.name!r} cannot name an extra slot; choose an identifier that names no other slot")
        if not isinstance(self.after, str):
            raise PlanError(f"extra slot {self.name!r} is after {self.after!r}; give a Slot, or an extra slot's name")
        if not isinstance(self.stream, StreamType):
            raise PlanError(
                f"extra slot {self.name!r} has stream {self.stream!r}; give StreamType.COMPUTE or StreamType.COMM"
            )
