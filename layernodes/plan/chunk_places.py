"""The slots of a chunk in forward order, each with all that running it takes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, final

from layernodes._megatron.chunk import ModelChunk
from layernodes._megatron.shared_parameters import shared_sites
from layernodes.nodes import WgradHook
from layernodes.plan.layer_plan import LayerPlan
from layernodes.plan.registry import SlotKey
from layernodes.plan.shape import ChunkShape
from layernodes.slots import POST_PROCESS, PRE_PROCESS, Slot, StreamType
from layernodes.stand_in import Site


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class ChunkPlace:
    """One slot of a chunk, in forward order, with all that running it takes.

    Attributes:
        layer: number of the layer; None for the chunk's ends.
        slot: name of the slot.
        stream: where it runs.
        node: called ``node(ctx, *inputs)``; None for a pass-through.
        reads: the handoffs that it takes.
        frees_input, touches_rng: what the node says of itself.
        new_hook: makes the weight-gradient hook of a microbatch; None where the slot has no ``W`` step.
        deferred: ids of the parameters whose gradients come with ``W``.
        precision: makes the low-precision context that its forward runs under; None: none.
        sites: where it holds parameters that other nodes of the chunk use too.
        is_first_layer, is_last_layer, is_mtp: what the node is told of its layer.
    """

    layer: int | None
    slot: str
    stream: StreamType
    node: Callable[..., Any] | None
    reads: tuple[str, ...] = ()
    frees_input: bool = False
    touches_rng: bool = True
    new_hook: Callable[[], WgradHook | None] | None = None
    deferred: frozenset[int] = frozenset()
    precision: Callable[[], AbstractContextManager[Any]] | None = None
    sites: tuple[Site, ...] = ()
    is_first_layer: bool = False
    is_last_layer: bool = False
    is_mtp: bool = False


def chunk_places(
    layers: Sequence[LayerPlan], shape: ChunkShape, num_decoder: int, chunk: ModelChunk | None
) -> list[ChunkPlace]:
    """Every slot of a chunk whose first ``num_decoder`` layers are the decoder's."""
    nodes = [{_name(slot): node for slot, node in plan.nodes.items()} for plan in layers]
    own_sites = dict(
        zip(
            [(i, name) for i, of_layer in enumerate(nodes) for name in of_layer],
            shared_sites([node.modules() for of_layer in nodes for node in of_layer.values()]),
            strict=True,
        )
    )
    end = (num_decoder - 1, [*nodes[num_decoder - 1]][-1]) if num_decoder else None
    places = []
    for number, slot in shape.places():
        if number is None:
            assert chunk is not None
            run_end = chunk.pre_process if slot.name == PRE_PROCESS else chunk.post_process
            places.append(
                ChunkPlace(
                    layer=None,
                    slot=slot.name,
                    stream=slot.stream,
                    node=_end_node(run_end, is_head=slot.name == PRE_PROCESS),
                    sites=chunk.sites(slot.name),
                )
            )
            continue
        node = nodes[number].get(slot.name)
        ends = (number, slot.name) == end
        is_mtp = number >= num_decoder
        first, last = (num_decoder, len(layers) - 1) if is_mtp else (0, num_decoder - 1)
        sites = own_sites.get((number, slot.name), ())
        if chunk is not None and is_mtp and slot.name == Slot.PRE_DISPATCH_COMPUTATION:
            sites += chunk.sites(slot.name)
        places.append(
            ChunkPlace(
                layer=number,
                slot=slot.name,
                stream=slot.stream,
                node=chunk.ends_decoder(node) if chunk is not None and node is not None and ends else node,
                reads=() if node is None else tuple(node._reads),
                frees_input=node is not None and node.frees_input(),
                touches_rng=node is not None and node.touches_rng(),
                new_hook=node.new_hook if node is not None and slot.wgrad else None,
                precision=None if node is None else layers[number].precision(node),
                deferred=frozenset() if node is None else frozenset(map(id, node.wgrad_parameters)),
                sites=sites,
                is_first_layer=number == first,
                is_last_layer=number == last,
                is_mtp=is_mtp,
            )
        )
    assert POST_PROCESS not in {place.slot for place in places} or chunk is not None
    return places


def _end_node(run_end: Callable[..., Any], *, is_head: bool) -> Callable[..., Any]:
    if is_head:
        return lambda ctx, hidden=None: run_end(ctx.chunk_state, hidden)
    return lambda ctx, hidden: run_end(ctx.chunk_state, hidden)


def _name(slot: SlotKey) -> str:
    return slot.value if isinstance(slot, Slot) else slot.name
