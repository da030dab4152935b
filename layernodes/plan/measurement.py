"""How measured costs were measured, and how far to trust them; a part of ``CostModel``, so that its file says it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from statistics import median
from typing import Annotated, final

from pydantic import Field

from layernodes.plan.strict_model import StrictModel

Count = Annotated[int, Field(ge=0)]
Share = Annotated[float, Field(ge=0, allow_inf_nan=False)]


@final
class SlotSpread(StrictModel):
    """How far the times of one slot's phases lie from their median: the median distance, as a share of the median.

    0.05 says that half of the times were within 5 % of the cost. None: measured less than twice, or it takes no time.

    Attributes:
        F, B, W: the spread of each phase.

    Raises:
        CostError: a negative or infinite number.
    """

    F: Share | None = None
    B: Share | None = None
    W: Share | None = None


@final
class Measurement(StrictModel):
    """How costs were measured.

    Attributes:
        repetitions: runs that the medians are over. warmup: runs before them that do not count.
        num_ranks: ranks that agreed on the costs.
        streams: what the two streams were, such as ``threads``.
        layers, ends: how far the times spread, by layer and slot, and of the chunk's ends.

    Raises:
        CostError: a value of another type, or a negative one.
    """

    repetitions: Count = 0
    warmup: Count = 0
    num_ranks: Count = 1
    streams: str = ""
    layers: Mapping[Count, Mapping[str, SlotSpread]] = {}
    ends: Mapping[str, SlotSpread] = {}

    @property
    def typical_spread(self) -> float:
        """The median of all spreads; 0 where nothing was measured twice."""
        return median(self._spreads() or [0.0])

    @property
    def largest_spread(self) -> float:
        """The largest of all spreads; 0 where nothing was measured twice."""
        return max(self._spreads(), default=0.0)

    def _spreads(self) -> list[float]:
        def slots() -> Iterator[SlotSpread]:
            for of_layer in self.layers.values():
                yield from of_layer.values()
            yield from self.ends.values()

        return [share for slot in slots() for share in (slot.F, slot.B, slot.W) if share is not None]
