"""Where the deferred weight gradients of a schedule go.

Contract: all other steps keep their order; every B whose weight gradients the shape defers gets one W after it, and a
module's Ws keep the order of its Bs, so that a valid schedule stays valid::

    waiting = []
    for each step that is no W:
        the place says "before this step":  emit waiting
        emit the step
        the place says "after this step":   emit waiting
        the step is a B that defers:        emit its W, or let it wait, as the place says
    emit waiting
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from enum import StrEnum

from layernodes.plan.shape import ChunkShape
from layernodes.plan.step import Step
from layernodes.slots import Phase, StreamType

_logger = logging.getLogger(__name__)


class WgradPlace(StrEnum):
    """Where deferred weight gradients run.

    ``AFTER_B``: directly after their B. ``NEXT_COMM``: directly after the next communication is launched, to run
    beside it. ``END``: after everything else. ``FIRST_LAYER_LAST``: after their B, but those of the first layer's
    first slot wait until the pass through the chunk is over, where Megatron-Core sends to the next pipeline stage.
    """

    AFTER_B = "after_b"
    NEXT_COMM = "next_comm"
    END = "end"
    FIRST_LAYER_LAST = "first_layer_last"


def place_wgrad(
    steps: Iterable[Step],
    *,
    forward_shape: ChunkShape | None,
    backward_shape: ChunkShape | None,
    place: WgradPlace,
) -> Iterator[Step]:
    """Yield the steps with their ``W``s, which need not be there before, at the given place.

    Args:
        steps: the steps in order.
        forward_shape: shape of the chunk that goes forward.
        backward_shape: shape of the chunk that goes backward; the same one for a schedule that is no pair.
        place: where the ``W``s go.
    """
    edges = {*_edges(forward_shape, Phase.F), *_edges(backward_shape, Phase.B)}
    first = _first_deferred(backward_shape)
    waiting: list[Step] = []
    for step in steps:
        if step.phase is Phase.W:
            continue
        if place is WgradPlace.FIRST_LAYER_LAST and (step.layer is None or _key(step) in edges):
            yield from waiting
            waiting.clear()
        yield step
        shape = forward_shape if step.phase is Phase.F else backward_shape
        slot = None if shape is None else shape.find(step)
        if slot is None:
            continue
        if place is WgradPlace.NEXT_COMM and slot.stream is StreamType.COMM and not slot.passthrough:
            yield from waiting
            waiting.clear()
        if step.phase is Phase.B and slot.wgrad:
            waiting.append(Step(Phase.W, step.microbatch, step.layer, step.slot))
            if place is WgradPlace.AFTER_B or (
                place is WgradPlace.FIRST_LAYER_LAST and (step.layer, step.slot) != first
            ):
                yield waiting.pop()
    yield from waiting


def warn_where_nothing_is_deferred(steps: Iterable[Step], backward_shape: ChunkShape | None) -> None:
    """Log a warning where no ``W`` can be placed: a schedule goes backward, and no layer of its shape defers anything.

    No error, since code that places them for any chunk also meets those with nothing to defer, all frozen for instance.
    """
    if backward_shape is None or not backward_shape.layers or any(backward_shape.wgrad_slots):
        return
    if any(step.phase is not Phase.F for step in steps):
        _logger.warning(
            "deferred() has no weight gradients to place: no layer of the shape defers any, and all come with B; build "
            "the chunk with wgrad='auto' (a shape alone: ChunkShape.of(..., wgrad=True)), or leave deferred() out"
        )


def _key(step: Step) -> tuple[Phase, int | None, str]:
    return step.phase, step.layer, step.slot


def _edges(shape: ChunkShape | None, phase: Phase) -> Iterator[tuple[Phase, int | None, str]]:
    """The step with which a pass through the chunk begins, without its microbatch."""
    real = [place for place in ([] if shape is None else shape.places()) if not place.slot.passthrough]
    if real:
        layer, slot = real[0] if phase is Phase.F else real[-1]
        yield phase, layer, slot.name


def _first_deferred(shape: ChunkShape | None) -> tuple[int, str] | None:
    if shape is None or not shape.layers or not shape.layers[0].wgrad_slots:
        return None
    return 0, shape.layers[0].wgrad_slots[0]
