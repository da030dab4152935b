"""Steps of single microbatches and ways to weave them: the parts that schedules are composed of.

Every function here yields or returns steps without checking them; ``validate`` does that. Pass-throughs are left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

from layernodes.errors import ScheduleError
from layernodes.plan.arguments import check_argument, check_items
from layernodes.plan.grid import stream_in
from layernodes.plan.shape import ChunkShape, LayerShape, SlotShape, check_shapes
from layernodes.plan.step import Step
from layernodes.slots import POST_PROCESS, PRE_PROCESS, Phase, Slot, StreamType

MEGATRON_ORDER: Final = "B.tail B.combine F.pre B.mlp F.dispatch W.mlp B.dispatch F.mlp F.combine B.pre F.tail W.pre"
"""Megatron-Core's order of one layer going forward beside one going backward (``TransformerLayerSchedulePlan.run``)."""

EARLY_RELEASE_ORDER: Final = (
    "B.tail B.combine F.pre B.mlp F.dispatch W.mlp B.dispatch B.pre F.mlp F.combine F.tail W.pre"
)
"""The same with ``ep_overlap_early_attn_memory_release``: attention goes backward before the experts go forward."""

_ADVICE: Final = "give each sequence of steps as an argument of its own: interleave(one, another)"
_BEATS: Final = ("pre", "dispatch", "mlp", "combine", "tail")
_BEAT_OF: Final = {
    Slot.PRE_DISPATCH_COMPUTATION: 0,
    Slot.MOE_DISPATCH: 1,
    Slot.MLP: 2,
    Slot.MOE_COMBINE: 3,
    Slot.POST_COMBINE: 4,
    Slot.MTP_POST_PROCESS: 4,
}
_WORDS: Final = (*(f"{phase}.{beat}" for phase in (Phase.F, Phase.B) for beat in _BEATS), "W.pre", "W.mlp")
# Megatron drains two stores, "pre" and "mlp"; weight gradients of other slots go with the one whose turn comes next.
_WGRAD_BEAT: Final = {"pre": "pre", "dispatch": "pre", "mlp": "mlp", "combine": "mlp", "tail": "mlp"}


def forward_steps(shape: ChunkShape, microbatch: int) -> Iterator[Step]:
    """The forward steps of one microbatch through a chunk of this ``shape``, in order."""
    check_argument("shape", shape, ChunkShape)
    for layer, slot in shape.places():
        if not slot.passthrough:
            yield Step(Phase.F, microbatch, layer, slot.name)


def backward_steps(shape: ChunkShape, microbatch: int) -> Iterator[Step]:
    """The backward steps of one microbatch through a chunk of this ``shape``, in order; each ``W`` right after its
    ``B``, of the slots that defer."""
    check_argument("shape", shape, ChunkShape)
    for layer, slot in reversed(list(shape.places())):
        if not slot.passthrough:
            yield Step(Phase.B, microbatch, layer, slot.name)
        if slot.wgrad:
            yield Step(Phase.W, microbatch, layer, slot.name)


def interleave(
    *sequences: Iterable[Step], shape: ChunkShape | None = None, num_steps: int | None = None
) -> Iterator[Step]:
    """Take turns between sequences: from each its steps up to and including the next communication, then the next.

    So each one's communication runs while the others compute. Order within a sequence is kept.

    Args:
        sequences: the sequences, e.g. of ``forward_steps``.
        shape: says which stream a slot is on; None takes Megatron-Core's streams, COMPUTE for other slots.
        num_steps: take this many steps in each turn instead.

    Raises:
        ScheduleError: ``num_steps`` is less than 1.
    """
    for number, sequence in enumerate(sequences):
        if not isinstance(sequence, Iterable):
            check_items(
                f"sequences[{number}]", sequence, Step, advice="take forward_steps(shape, microbatch) or a list"
            )
    check_argument("num_steps", num_steps, int, type(None))
    if num_steps is not None and num_steps < 1:
        raise ScheduleError(f"num_steps={num_steps}; take at least 1 step in each turn")
    stream_of = stream_in(shape)
    waiting = [iter(sequence) for sequence in sequences]
    while waiting:
        for sequence in tuple(waiting):
            for taken, step in enumerate(sequence, start=1):
                check_argument("what interleave takes from a sequence", step, Step, advice=_ADVICE)
                yield step
                if taken == num_steps or (num_steps is None and stream_of(step) is StreamType.COMM):
                    break
            else:
                waiting.remove(sequence)


def pair_steps(
    forward_shape: ChunkShape | None,
    backward_shape: ChunkShape | None,
    *,
    forward: int = 0,
    backward: int = 1,
    order: str = MEGATRON_ORDER,
) -> Iterator[Step]:
    """One microbatch forward beside another backward, layer beside layer, as Megatron-Core runs them.

    The forward's first layer meets the backward's last, and so on; what is left of the longer one follows alone. The
    first layer's ``W.pre`` waits until all layers are done (Megatron sends to the next pipeline stage there).
    Mirrors ``TransformerModelChunkSchedulePlan.run``.

    Args:
        forward_shape: shape of the chunk that goes forward; None: nothing does.
        backward_shape: shape of the chunk that goes backward; None: nothing does.
        forward: number of the microbatch that goes forward.
        backward: number of the microbatch that goes backward.
        order: the order of two layers: words ``PHASE.BEAT`` with the beats pre, dispatch, mlp, combine and tail (all
            that follows combine).

    Raises:
        ScheduleError: ``order`` has a word that is not one of these, or one twice.
    """
    check_shapes(forward_shape=forward_shape, backward_shape=backward_shape)
    check_argument("order", order, str, advice="give words such as 'F.pre B.mlp', as in EARLY_RELEASE_ORDER")
    words = order.split()
    for word in words:
        if word not in _WORDS or words.count(word) > 1:
            raise ScheduleError(f"order has {word!r}, unknown or twice; use each once of {' '.join(_WORDS)}")
    f_layers = [] if forward_shape is None else list(enumerate(forward_shape.layers))
    b_layers = [] if backward_shape is None else list(enumerate(backward_shape.layers))[::-1]
    if forward_shape is not None and forward_shape.pre_process:
        yield Step(Phase.F, forward, None, PRE_PROCESS)
    if backward_shape is not None and backward_shape.post_process:
        yield Step(Phase.B, backward, None, POST_PROCESS)
    held: list[Step] = []
    for turn in range(max(len(f_layers), len(b_layers))):
        beats: dict[str, list[Step]] = {}
        if turn < len(f_layers):
            beats |= _forward_beats(*f_layers[turn], microbatch=forward)
        if turn < len(b_layers):
            beats |= _backward_beats(*b_layers[turn], microbatch=backward)
        if turn == len(b_layers) - 1:
            held = beats.pop("W.pre")
        for word in words:
            yield from beats.get(word, ())
    yield from held
    if forward_shape is not None and forward_shape.post_process:
        yield Step(Phase.F, forward, None, POST_PROCESS)
    if backward_shape is not None and backward_shape.pre_process:
        yield Step(Phase.B, backward, None, PRE_PROCESS)


def _forward_beats(number: int, layer: LayerShape, *, microbatch: int) -> dict[str, list[Step]]:
    beats: dict[str, list[Step]] = {f"F.{beat}": [] for beat in _BEATS}
    for slot, beat in _slot_beats(layer):
        if not slot.passthrough:
            beats[f"F.{beat}"].append(Step(Phase.F, microbatch, number, slot.name))
    return beats


def _backward_beats(number: int, layer: LayerShape, *, microbatch: int) -> dict[str, list[Step]]:
    beats: dict[str, list[Step]] = {f"{phase}.{beat}": [] for phase in (Phase.B, Phase.W) for beat in _BEATS}
    for slot, beat in reversed(_slot_beats(layer)):
        if not slot.passthrough:
            beats[f"B.{beat}"].append(Step(Phase.B, microbatch, number, slot.name))
        if slot.wgrad:
            beats[f"W.{_WGRAD_BEAT[beat]}"].append(Step(Phase.W, microbatch, number, slot.name))
    return beats


def _slot_beats(layer: LayerShape) -> list[tuple[SlotShape, str]]:
    """The beat of each slot of a layer, never falling along the layer.

    A user's own slot shares the beat of the slot before it if it shares its stream, and else goes with the next beat,
    where work of its stream is, but never beyond the beat of the slot after it.
    """
    beats: list[int] = []
    stream = StreamType.COMPUTE
    for slot in layer.slots:
        beat = beats[-1] if beats else 0
        known = _beat_of_name(slot.name)
        beats.append(known if known is not None else beat if slot.stream is stream else beat + 1)
        stream = slot.stream
    limit = len(_BEATS) - 1
    for index in reversed(range(len(beats))):
        limit = beats[index] = min(beats[index], limit)
    return [(slot, _BEATS[beat]) for slot, beat in zip(layer.slots, beats, strict=True)]


def _beat_of_name(name: str) -> int | None:
    return _BEAT_OF[Slot(name)] if name in _BEAT_OF else None
