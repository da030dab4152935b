"""Hypothesis strategies for schedules, drawn by the hand-written oracle, and shapes as it knows them.

``layernodes.testing`` has the shapes; its valid schedules follow the library's own rules, so what tests those rules
draws its schedules here.
"""

from __future__ import annotations

import random

from hypothesis import strategies as st

from layernodes.plan.schedule import Schedule
from layernodes.plan.shape import ChunkShape, LayerShape
from tests import oracle


def plain_layer(layer: LayerShape) -> oracle.Layer:
    """A layer as the oracle knows it."""
    return {
        "slots": [slot.name for slot in layer.slots],
        "optional": [slot.name for slot in layer.slots if slot.passthrough],
        "wgrad": [slot.name for slot in layer.slots if slot.wgrad],
    }


def plain(shape: ChunkShape) -> oracle.Chunk:
    """A shape as the oracle knows it."""
    return {"pre": shape.pre_process, "post": shape.post_process, "layers": [plain_layer(x) for x in shape.layers]}


def valid_schedules(shape: ChunkShape, num_microbatches: int, mode: str = "train") -> st.SearchStrategy[Schedule]:
    """Random topological orders, drawn by the oracle; some pass-throughs are named."""

    def build(seed: int) -> Schedule:
        texts = oracle.random_schedule(plain(shape), num_microbatches, random.Random(seed), mode)
        return Schedule.parse("\n".join(texts))

    return st.integers(0, 2**32 - 1).map(build)
