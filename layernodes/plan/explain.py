"""Why a step has no place in a schedule, in words that say what to change."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from layernodes.errors import Violation
from layernodes.plan.closest import closest
from layernodes.plan.rules import Mode, Rules
from layernodes.plan.shape import ChunkShape
from layernodes.plan.step import Step
from layernodes.slots import CHUNK_ENDS, Phase


class _Reason(NamedTuple):
    rule: str
    other: str | None
    text: str


def explain_foreign(step: Step, position: int, rules: Rules) -> list[Violation]:
    """Every reason why a step that is not among ``rules.ids`` may not stand in the schedule."""
    return [
        Violation(
            rule=reason.rule,
            step=str(step),
            position=position,
            other=reason.other,
            message=f"{step} at step {position} {reason.text}",
        )
        for reason in _reasons(step, rules)
    ]


def _reasons(step: Step, rules: Rules) -> Iterator[_Reason]:
    shape = rules.shapes[step.phase]
    if shape is None:
        yield _Reason("unexpected", None, _phase_text(step, rules))
        return
    microbatches = rules.microbatches[step.phase]
    if step.microbatch not in microbatches:
        yield _Reason("foreign", None, _microbatch_text(step, rules))
    if step.layer is not None and step.layer >= shape.num_layers:
        yield _Reason("foreign", None, f"is of a layer that does not exist: the chunk has {_layers(shape)}")
    elif shape.find(step) is None:
        yield _slot_reason(step, shape)
    elif step.phase is Phase.W and step.slot not in _deferred(step, shape):
        yield _Reason("unexpected", None, _wgrad_text(step, shape))


def _phase_text(step: Step, rules: Rules) -> str:
    if rules.mode is Mode.FORWARD:
        return (
            f"is no forward step: a schedule of mode 'forward' has no {step.phase}; leave it out, or use mode 'train'"
        )
    side = "forward" if step.phase is Phase.F else "backward"
    return f"belongs to the {side} chunk of the pair, but there is none; leave it out, or give {side}_shape"


def _microbatch_text(step: Step, rules: Rules) -> str:
    microbatches = rules.microbatches[step.phase]
    if rules.mode is Mode.PAIR:
        return f"is of microbatch {step.microbatch}; in a pair, {step.phase} is of microbatch {microbatches[0]}"
    numbered = f", numbered 0 to {len(microbatches) - 1}" if microbatches else ""
    return f"is of microbatch {step.microbatch}; num_microbatches is {len(microbatches)}{numbered}"


def _layers(shape: ChunkShape) -> str:
    if shape.num_layers == 1:
        return "one layer, numbered 0"
    return f"{shape.num_layers} layers" + (f", numbered 0 to {shape.num_layers - 1}" if shape.layers else "")


def _slot_reason(step: Step, shape: ChunkShape) -> _Reason:
    if step.layer is None:
        if step.slot in CHUNK_ENDS:
            return _Reason("foreign", None, f"has no place: this chunk has no {step.slot}")
        meant = closest(step.slot, shape.ends)
        names, owner = shape.ends, "the ends of this chunk are"
        hint = f"steps of a layer name it, as in {Step(step.phase, step.microbatch, 0, step.slot)}"
    else:
        meant = closest(step.slot, shape.layers[step.layer].slot_names)
        names, owner = shape.layers[step.layer].slot_names, f"layer {step.layer} has"
        hint = ""
    if meant is not None:
        hint = f"did you mean {Step(step.phase, step.microbatch, step.layer, meant)}?"
    text = f"names an unknown slot {step.slot!r}: {owner} {', '.join(names) or 'none'}" + (f"; {hint}" if hint else "")
    return _Reason("unknown_slot", meant, text)


def _deferred(step: Step, shape: ChunkShape) -> tuple[str, ...]:
    return () if step.layer is None else shape.wgrad_slots[step.layer]


def _wgrad_text(step: Step, shape: ChunkShape) -> str:
    if step.layer is None:
        return f"has no place: the ends of a chunk have no W, their weight gradients come with B; leave {step} out"
    b = Step(Phase.B, step.microbatch, step.layer, step.slot)
    deferred = _deferred(step, shape)
    if step.slot in shape.layers[step.layer].passthrough:
        return f"has no place: layer {step.layer} does nothing in {step.slot}; leave it out"
    if deferred:
        return f"has no place: layer {step.layer} defers {', '.join(deferred)} only, the rest comes with {b}"
    return (
        f"has no place: layer {step.layer} defers nothing, its weight gradients come with {b}; leave it out, "
        f"or switch deferral on with ChunkShape.of(..., wgrad=True) or ChunkPlan.build(..., wgrad='auto')"
    )
