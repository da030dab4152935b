"""Hypothesis strategies for shapes and schedules."""

from __future__ import annotations

import random

from hypothesis import strategies as st

from layernodes.plan.schedule import Schedule
from layernodes.plan.shape import ChunkShape, ExtraSlot, LayerShape
from layernodes.slots import Slot, StreamType
from tests import oracle

STREAMS = st.sampled_from(StreamType)


@st.composite
def extra_slots(draw: st.DrawFn) -> list[ExtraSlot]:
    """No, one or two slots of the user's own."""
    names = draw(st.lists(st.sampled_from(["gate", "norm_out", "probe"]), unique=True, max_size=2))
    slots = [slot for slot in Slot if slot is not Slot.POST_COMBINE]
    return [ExtraSlot(name, after=draw(st.sampled_from(slots)), stream=draw(STREAMS)) for name in names]


@st.composite
def chunk_shapes(draw: st.DrawFn, *, min_layers: int = 0, max_layers: int = 4) -> ChunkShape:
    """Shapes of dense, MoE and MTP layers, with and without ends, deferral, split combine and extra slots."""
    kinds = draw(st.lists(st.sampled_from(["moe", "dense"]), min_size=min_layers, max_size=max_layers))
    num_mtp = draw(st.integers(0, min(2, len(kinds))))
    own = draw(extra_slots()) if draw(st.booleans()) else []
    wgrad: bool | list[str] = draw(st.sampled_from([False, True, ["mlp"]]))
    return ChunkShape.of(
        kinds[: len(kinds) - num_mtp],
        mtp=kinds[len(kinds) - num_mtp :],
        pre_process=draw(st.booleans()),
        post_process=draw(st.booleans()),
        wgrad=[*wgrad, *(slot.name for slot in own)] if isinstance(wgrad, list) else wgrad,
        split_combine=draw(st.booleans()),
        extra_slots=own,
    )


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
