"""Costs read off measured timelines.

The seconds of a slot's phase are the median over all timelines and microbatches in which it ran; what a kind of layer
costs is the median over its layers. Where the shape does not defer a slot's weight gradients, they are part of what
its ``B`` took. Steps slow each other down when they run at the same time, so measure runs in which they do not (streams
``"inline"``, or a serial schedule), and several of them, without the first; ``profile`` does all that.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import median
from types import MappingProxyType

from layernodes.errors import CostError
from layernodes.plan.costs import CostModel, SlotCost
from layernodes.plan.measurement import Measurement, SlotSpread
from layernodes.plan.shape import ChunkShape
from layernodes.plan.step import Step
from layernodes.plan.timeline import Timeline
from layernodes.slots import Phase

Place = tuple[int | None, str]


def costs_of_timelines(
    timelines: Sequence[Timeline],
    shape: ChunkShape,
    *,
    held_bytes: Mapping[Step, int] = MappingProxyType({}),
    name: str = "measured",
) -> CostModel:
    """Costs of a chunk, from what its runs took; ``CostModel.measurement`` has their spread.

    Args:
        timelines: measured runs.
        shape: the chunk's shape.
        held_bytes: what each ``F`` of one microbatch keeps, and what waits for each ``W``; 0 where left out.
        name: what to call the costs.

    Raises:
        CostError: no timelines, or a step that the shape does not have.
    """
    if not any(len(timeline) for timeline in timelines):
        raise CostError("no steps were measured; run a schedule first and give its timeline")
    seconds: dict[tuple[Phase, Place], list[float]] = {}
    for timeline in timelines:
        for interval in timeline.intervals:
            step = interval.step
            if shape.find(step) is None:
                raise CostError(f"{step} was measured, but the shape has no such slot: {shape}")
            seconds.setdefault((step.phase, (step.layer, step.slot)), []).append(interval.duration)

    held = {(step.phase, (step.layer, step.slot)): count for step, count in held_bytes.items()}

    def cost(place: Place) -> SlotCost:
        f, b, w = (median(seconds.get((phase, place), [0.0])) for phase in Phase)
        kept, waiting = (held.get((phase, place), 0) for phase in (Phase.F, Phase.W))
        return SlotCost(F=f, B=b, W=w, activation_bytes=kept, wgrad_bytes=waiting)

    def spread(place: Place) -> SlotSpread:
        f, b, w = (_spread(seconds.get((phase, place), [])) for phase in Phase)
        return SlotSpread(F=f, B=b, W=w)

    layers = _by_layer(shape, cost)
    return CostModel(
        name=name,
        kinds={kind: _typical(kind, shape, layers) for kind in dict.fromkeys(layer.kind for layer in shape.layers)},
        layers=layers,
        ends={slot: cost((None, slot)) for slot in shape.ends},
        streams={slot.name: slot.stream for layer in shape.layers for slot in layer.slots},
        measurement=Measurement(
            repetitions=len(timelines),
            layers=_by_layer(shape, spread),
            ends={slot: spread((None, slot)) for slot in shape.ends},
        ),
    )


def _by_layer[T](shape: ChunkShape, of_place: Callable[[Place], T]) -> dict[int, dict[str, T]]:
    return {
        number: {slot: of_place((number, slot)) for slot in layer.slot_names}
        for number, layer in enumerate(shape.layers)
    }


def _spread(seconds: Sequence[float]) -> float | None:
    """The median distance from the median, as a share of it."""
    middle = median(seconds) if len(seconds) > 1 else 0.0
    return median(abs(value - middle) for value in seconds) / middle if middle > 0 else None


def _typical(kind: str, shape: ChunkShape, layers: dict[int, dict[str, SlotCost]]) -> dict[str, SlotCost]:
    """The median of each slot over the layers of a kind in which it does something."""
    found: dict[str, list[SlotCost]] = {}
    for number, layer in enumerate(shape.layers):
        if layer.kind == kind:
            for slot in layer.slots:
                if not slot.passthrough:
                    found.setdefault(slot.name, []).append(layers[number][slot.name])
    return {slot: _middle(costs) for slot, costs in found.items()}


def _middle(costs: Sequence[SlotCost]) -> SlotCost:
    """The median of each figure."""
    return SlotCost(
        F=median(c.F for c in costs),
        B=median(c.B for c in costs),
        W=median(c.W for c in costs),
        activation_bytes=round(median(c.activation_bytes for c in costs)),
        wgrad_bytes=round(median(c.wgrad_bytes for c in costs)),
    )
