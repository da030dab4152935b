"""Costs read off measured timelines.

The seconds of a slot's phase are the median over all timelines and microbatches in which it ran; what a kind of layer
costs is the median over its layers. Where the shape does not defer a slot's weight gradients, they are part of what
its ``B`` took. Steps slow each other down when they run at the same time, so measure runs in which they do not (streams
``"inline"``, or a serial schedule), and several of them, without the first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import final

from layernodes.errors import CostError
from layernodes.plan.costs import CostModel, SlotCost
from layernodes.plan.shape import ChunkShape
from layernodes.plan.timeline import Timeline
from layernodes.slots import Phase

Key = tuple[int | None, str]


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredCosts:
    """Costs, and how far to trust them.

    Attributes:
        costs: the medians.
        spread: for each phase of each slot that was measured more than once, the median distance of its times from
            their median, as a share of that.
    """

    costs: CostModel
    spread: dict[tuple[Phase, int | None, str], float]

    @property
    def typical_spread(self) -> float:
        """The median of ``spread``; 0 where nothing was measured twice."""
        return median(self.spread.values()) if self.spread else 0.0


def costs_of_timelines(timelines: Sequence[Timeline], shape: ChunkShape, *, name: str = "measured") -> MeasuredCosts:
    """Costs of a chunk, from what its runs took.

    Args:
        timelines: measured runs.
        shape: the chunk's shape.
        name: what to call the costs.

    Raises:
        CostError: no timelines, or a step that the shape does not have.
    """
    if not any(len(timeline) for timeline in timelines):
        raise CostError("no steps were measured; run a schedule first and give its timeline")
    seconds: dict[tuple[Phase, int | None, str], list[float]] = {}
    for timeline in timelines:
        for interval in timeline.intervals:
            step = interval.step
            if shape.find(step) is None:
                raise CostError(f"{step} was measured, but the shape has no such slot: {shape}")
            seconds.setdefault((step.phase, step.layer, step.slot), []).append(interval.duration)
    middle = {key: median(values) for key, values in seconds.items()}
    spread = {
        key: median(abs(value - middle[key]) for value in values) / middle[key]
        for key, values in seconds.items()
        if len(values) > 1 and middle[key] > 0
    }
    by_place = {
        (layer, slot.name): SlotCost(
            F=middle.get((Phase.F, layer, slot.name), 0.0),
            B=middle.get((Phase.B, layer, slot.name), 0.0),
            W=middle.get((Phase.W, layer, slot.name), 0.0),
        )
        for layer, slot in shape.places()
    }
    layers = {
        number: {slot: by_place[number, slot] for slot in layer.slot_names} for number, layer in enumerate(shape.layers)
    }
    costs = CostModel(
        name=name,
        kinds={kind: _typical(kind, shape, by_place) for kind in dict.fromkeys(layer.kind for layer in shape.layers)},
        layers=layers,
        ends={slot: by_place[None, slot] for slot in shape.ends},
        streams={slot.name: slot.stream for layer in shape.layers for slot in layer.slots},
    )
    return MeasuredCosts(costs=costs, spread=spread)


def _typical(kind: str, shape: ChunkShape, by_place: dict[Key, SlotCost]) -> dict[str, SlotCost]:
    """The median of each slot over the layers of a kind in which it does something."""
    found: dict[str, list[SlotCost]] = {}
    for number, layer in enumerate(shape.layers):
        if layer.kind == kind:
            for slot in layer.slots:
                if not slot.passthrough:
                    found.setdefault(slot.name, []).append(by_place[number, slot.name])
    return {
        slot: SlotCost(F=median(c.F for c in costs), B=median(c.B for c in costs), W=median(c.W for c in costs))
        for slot, costs in found.items()
    }
