"""How long each slot takes: wrappers around the nodes of Megatron-Core's schedule plan that record events.

Contract: a wrapper changes nothing about its node but the moment it starts, and that only by waiting first for what
the node itself waits for, so that the wait is not counted. Times are those of the node's stream; on the CPU host, the
clock's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple, Protocol, final

import torch
from megatron.core.models.common.model_chunk_schedule_plan import TransformerModelChunkSchedulePlan
from torch import Tensor

from layernodes.plan.layer_plan import LayerPlan
from layernodes.slots import MEGATRON_SLOTS, Phase, Slot

Tensors = Tensor | tuple[Tensor | None, ...] | None

_WATCHED: Final = frozenset(MEGATRON_SLOTS)


class Place(NamedTuple):
    """Which call it is."""

    microbatch: int
    layer: int
    slot: Slot
    phase: Phase


class SlotCall(NamedTuple):
    """One call and when it ran, in seconds from the timer's making."""

    place: Place
    start: float
    end: float


class PlanNode(Protocol):
    """One slot as Megatron-Core's ``TransformerLayerSchedulePlan`` calls it."""

    stream: torch.cuda.Stream | Callable[[], torch.cuda.Stream]  # the latter until first use
    event: torch.cuda.Event  # after which the node may start

    def forward(self, *inputs: Tensors) -> Tensors: ...

    def backward(self, *gradients: Tensors) -> Tensors: ...

    def backward_dw(self) -> None: ...


@final
class SlotTimer:
    """Records every call of the slots of the schedule plans that it watches."""

    def __init__(self) -> None:
        self._origin = _event()
        self._origin.record()
        self._calls: list[tuple[Place, torch.cuda.Event, torch.cuda.Event]] = []

    def watch(
        self, schedule_plan: TransformerModelChunkSchedulePlan, layers: Sequence[LayerPlan], microbatch: int
    ) -> None:
        """Put wrappers around the slots of a schedule plan that has not run yet."""
        for index, layer in enumerate(layers):
            slots = schedule_plan.get_layer(index)
            for slot in _WATCHED & layer.nodes.keys():
                node = _TimedNode(getattr(slots, slot.value), self, Place(microbatch, index, slot, Phase.F))
                setattr(slots, slot.value, node)

    def record(self, place: Place, node: PlanNode, run: Callable[[], Tensors]) -> Tensors:
        """Run one call of ``node`` between two events on its stream."""
        stream = node.stream() if callable(node.stream) else node.stream
        node.event.wait(stream)
        start, end = _event(), _event()
        start.record(stream)
        result = run()
        end.record(stream)
        self._calls.append((place, start, end))
        return result

    def calls(self) -> tuple[SlotCall, ...]:
        """All calls so far, in the order in which they were made; waits for the device."""
        torch.cuda.synchronize()
        since = self._origin.elapsed_time
        return tuple(SlotCall(place, since(start) / 1e3, since(end) / 1e3) for place, start, end in self._calls)


@final
class _TimedNode:
    def __init__(self, node: PlanNode, timer: SlotTimer, place: Place) -> None:
        self._node = node
        self._timer = timer
        self._place = place

    def forward(self, *inputs: Tensors) -> Tensors:
        return self._timer.record(self._place, self._node, lambda: self._node.forward(*inputs))

    def backward(self, *gradients: Tensors) -> Tensors:
        place = self._place._replace(phase=Phase.B)
        return self._timer.record(place, self._node, lambda: self._node.backward(*gradients))

    def backward_dw(self) -> None:
        self._node.backward_dw()


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch leaves its __new__ untyped
