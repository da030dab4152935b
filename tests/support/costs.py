"""Cost models for tests: from the oracle's plain form, and drawn at random."""

from __future__ import annotations

import random

from layernodes.plan.costs import CostModel, SlotCost
from layernodes.plan.shape import ChunkShape
from tests import oracle


def worked_costs(worked: oracle.Worked) -> CostModel:
    """The costs of a timeline worked out by hand."""

    def slot_cost(numbers: tuple[int, ...]) -> SlotCost:
        return SlotCost(
            **dict(zip(("F", "B", "W", "activation_bytes", "wgrad_bytes"), numbers, strict=False))  # type: ignore[arg-type]
        )

    def slots(costs: dict[str, tuple[int, ...]]) -> dict[str, SlotCost]:
        return {oracle.LONG.get(slot, slot): slot_cost(numbers) for slot, numbers in costs.items()}

    return CostModel(
        kinds={kind: slots(costs) for kind, costs in worked["costs"].items()},
        layers={layer: slots(costs) for layer, costs in worked.get("layers", {}).items()},
        ends=slots(worked.get("ends", {})),
        compute_slowdown=worked.get("slowdown", 1),
        communication_slowdown=worked.get("comm_slowdown", 1),
        hardware_queues=worked.get("queues", 2),
    )


def random_costs(
    shape: ChunkShape,
    rng: random.Random,
    *,
    highest: int = 9,
    queues: int = 2,
    slowdowns: tuple[float, float] = (1.0, 1.0),
) -> CostModel:
    """Whole seconds for every slot of every layer, so that sums are exact; some are 0."""

    def cost() -> SlotCost:
        f, b, w = (rng.randint(0, highest) for _ in range(3))
        return SlotCost(F=f, B=b, W=w, activation_bytes=rng.randint(0, highest), wgrad_bytes=rng.randint(0, highest))

    layers = {n: {slot.name: cost() for slot in layer.slots} for n, layer in enumerate(shape.layers)}
    ends = {name: cost() for name in shape.ends}
    return CostModel(
        kinds={},
        layers=layers,
        ends=ends,
        hardware_queues=queues,
        compute_slowdown=slowdowns[0],
        communication_slowdown=slowdowns[1],
    )
