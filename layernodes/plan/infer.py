"""The rules of a schedule, as far as nobody gave them: read off its steps.

Contract: linear in the steps and in the highest numbers in them. For a schedule that is valid for some shape, the
rules give its steps the same dependencies as that shape's rules: a slot that no step names adds none. A slot is
deferred if a ``W`` of it is there; a layer is ``"moe"`` if it has a step on the communication stream, else ``"dense"``.
Slots stand in Megatron-Core's order, or where some are not Megatron-Core's, in the order of the first forward (else
of the first backward, read from its end).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from layernodes.errors import ScheduleError
from layernodes.plan.grid import StreamOf, usual_stream
from layernodes.plan.rules import Mode, Rules
from layernodes.plan.schedule import PairSchedule, Schedule
from layernodes.plan.shape import ChunkShape, LayerShape, SlotShape
from layernodes.plan.step import Step
from layernodes.slots import POST_PROCESS, PRE_PROCESS, Phase, Slot, StreamType

_SLACK = 10_000
_ORDER = {str(slot): index for index, slot in enumerate(Slot)}


def infer_rules(schedule: Schedule | PairSchedule, stream_of: StreamOf = usual_stream) -> Rules:
    """Rules for the steps of a schedule or pair, from the steps alone.

    Args:
        schedule: the schedule.
        stream_of: the stream of each slot.

    Raises:
        ScheduleError: numbers of layers or microbatches so high that most of them cannot have steps.
    """
    steps = schedule.steps
    _check_highest("microbatch", (step.microbatch for step in steps), len(steps))
    if isinstance(schedule, PairSchedule):
        return rules_of_pair_steps(steps, stream_of)
    trains = any(step.phase is not Phase.F for step in steps)
    num_microbatches = max((step.microbatch + 1 for step in steps), default=0)
    return Rules.of(infer_shape(steps, stream_of), num_microbatches, Mode.TRAIN if trains else Mode.FORWARD)


def rules_of_shape(
    schedule: Schedule | PairSchedule, shape: ChunkShape | None, backward_shape: ChunkShape | None = None
) -> Rules:
    """Rules for the steps of a schedule or pair of this shape; the number of microbatches is read off the steps.

    Args:
        schedule: the schedule.
        shape: shape of the chunk, of a pair's forward chunk.
        backward_shape: shape of a pair's backward chunk; None: ``shape``.

    Raises:
        ScheduleError: a backward shape alone, for a schedule that is no pair.
    """
    if isinstance(schedule, PairSchedule):
        return Rules.of_pair(shape, backward_shape or shape)
    if shape is None:
        raise ScheduleError("backward_shape is for pairs; give the shape of a schedule's chunk as shape")
    trains = any(step.phase is not Phase.F for step in schedule)
    inferred = len({step.microbatch for step in schedule})
    highest = max((step.microbatch + 1 for step in schedule), default=0)
    num_microbatches = highest if highest <= len(schedule) else inferred
    return Rules.of(shape, num_microbatches, Mode.TRAIN if trains else Mode.FORWARD)


def rules_of_pair_steps(steps: Sequence[Step], stream_of: StreamOf = usual_stream) -> Rules:
    """Rules for the steps of a pair, from the steps alone."""
    forward = [step for step in steps if step.phase is Phase.F]
    backward = [step for step in steps if step.phase is not Phase.F]
    return Rules.of_pair(
        infer_shape(forward, stream_of) if forward else None, infer_shape(backward, stream_of) if backward else None
    )


def infer_shape(steps: Iterable[Step], stream_of: StreamOf = usual_stream) -> ChunkShape:
    """The smallest shape that has all these steps.

    Raises:
        ScheduleError: a number of a layer so high that most layers cannot have steps.
    """
    steps = tuple(steps)
    _check_highest("layer", (step.layer or 0 for step in steps), len(steps))
    slots: dict[Phase, dict[int | None, dict[str, Step]]] = {phase: {} for phase in Phase}
    for step in steps:
        slots[step.phase].setdefault(step.layer, {}).setdefault(step.slot, step)
    ends = {name for by_layer in slots.values() for name in by_layer.pop(None, {})}
    num_layers = max((layer + 1 for by_layer in slots.values() for layer in by_layer if layer is not None), default=0)
    empty = LayerShape(kind="empty", slots=())

    def layer_shape(layer: int) -> LayerShape:
        forward, backward, wgrad = (slots[phase].get(layer, {}) for phase in Phase)
        found = {**forward, **dict(reversed(backward.items())), **wgrad}
        names = sorted(found, key=lambda name: _ORDER[name]) if found.keys() <= _ORDER.keys() else list(found)
        shapes = tuple(SlotShape(name=name, stream=stream_of(found[name]), wgrad=name in wgrad) for name in names)
        communicates = any(slot.stream is StreamType.COMM for slot in shapes)
        return LayerShape(kind="moe" if communicates else "dense", slots=shapes) if shapes else empty

    return ChunkShape(
        layers=tuple(layer_shape(layer) for layer in range(num_layers)),
        pre_process=PRE_PROCESS in ends,
        post_process=POST_PROCESS in ends,
    )


def _check_highest(what: str, numbers: Iterable[int], num_steps: int) -> None:
    highest = max(numbers, default=0)
    if highest > num_steps + _SLACK:
        raise ScheduleError(f"{what} {highest} in a schedule of {num_steps} steps; number from 0, or give the shape")
