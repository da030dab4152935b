"""A schedule compiled for one chunk: what each step runs, on which lane, and what it waits for.

Contract: a lane is a stream's steps in schedule order (a FIFO). A step waits for the steps of the *other* lane that
must be done before it; of those, only the latest matters, since lanes are FIFO::

    must be done before a step:    its predecessors in the rules
                                   the step before it that touches random generators, if it does too
                                   the step before it that shares parameters with it across lanes
    and before the last of a layer's pass (forward; backward with W), its other steps

A pair's program may also have *calls*, functions of the trainer's around its passes (pipeline sends and receives)::

    pre_forward     before the first F        pre_backward     before the first B, after pre_forward
    post_forward    after the last layer's F  post_backward    after the first layer's B, after post_forward

The sends, ``post_forward`` and ``post_backward``, keep that order whatever the schedule, since pipeline ranks with
other schedules must meet in them; the others only wait for what was issued before.

A program depends on the schedule and the shape alone, so it is compiled once and reused by every run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Final, final

from layernodes.plan.rules import NONE, Rules
from layernodes.plan.step import Step
from layernodes.slots import POST_PROCESS, PRE_PROCESS, Phase, StreamType

if TYPE_CHECKING:
    from layernodes.plan.chunk_plan import ChunkPlan

LANES: Final = (StreamType.COMPUTE, StreamType.COMM)
"""The streams, by lane number."""


class Call(StrEnum):
    """The trainer's functions around the passes of a pair."""

    PRE_FORWARD = "pre_forward"
    PRE_BACKWARD = "pre_backward"
    POST_FORWARD = "post_forward"
    POST_BACKWARD = "post_backward"


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Op:
    """One step of a program, or one call.

    Attributes:
        step, call: the step, or the call; one of them is None.
        text: what it is called in errors and traces.
        position: its position in the schedule.
        run: which of the program's chunk runs it works on.
        place: index of its slot among the chunk's places.
        lane: number of its stream in ``LANES``.
        index: its index within its lane.
        waits_for: index, within the other lane, of the last step that must be done before it; ``NONE`` for none.
        is_awaited: whether a step of the other lane waits for this one or a later one before the next awaited.
        communicates: whether it may issue collectives.
        ends_forward, begins_backward, ends_backward: first or last step of a microbatch's pass.
        begins_layer, ends_layer: first or last step of a microbatch's pass through a layer, forward, or backward with
            its weight gradients.
    """

    step: Step | None
    call: Call | None
    text: str
    position: int
    run: int
    place: int
    lane: int
    index: int
    waits_for: int
    is_awaited: bool
    communicates: bool
    ends_forward: bool
    begins_backward: bool
    ends_backward: bool
    begins_layer: bool
    ends_layer: bool


@final
@dataclass(frozen=True, slots=True)
class Program:
    """The ops of a schedule, in its order, and by lane, and the rules that its steps were checked against."""

    ops: tuple[Op, ...]
    lanes: tuple[tuple[Op, ...], tuple[Op, ...]]
    rules: Rules


@dataclass(kw_only=True, slots=True)
class _Draft:
    """An op in the making: what must be done before it, as positions."""

    step: Step | None
    call: Call | None
    lane: int
    before: list[int]


def compile_steps(
    steps: Sequence[Step],
    rules: Rules,
    chunks: Sequence[ChunkPlan | None],
    calls: Mapping[Call, int] | None = None,
) -> Program:
    """Compile valid steps.

    Args:
        steps: the steps, valid under ``rules``.
        rules: the rules that they were checked against.
        chunks: the chunk of each microbatch; all the same, or the two of a pair.
        calls: the calls of a pair, each with its lane.
    """
    places = [{} if chunk is None else {(p.layer, p.slot): i for i, p in enumerate(chunk.places)} for chunk in chunks]
    drafts = _drafts(steps, rules, chunks, places)
    _let_layers_end_last(drafts)
    if calls:
        drafts = _with_calls(drafts, calls)
    index_in_lane: list[int] = []
    counts = [0, 0]
    for draft in drafts:
        index_in_lane.append(counts[draft.lane])
        counts[draft.lane] += 1
    waits = [
        max((index_in_lane[b] for b in draft.before if drafts[b].lane != draft.lane), default=NONE) for draft in drafts
    ]
    awaited = {(1 - draft.lane, wait) for draft, wait in zip(drafts, waits, strict=True)}
    first, last = _ends(drafts)
    of_layers = _layer_passes(drafts)
    begins_layer = {positions[0] for positions in of_layers}
    ends_layer = {positions[-1] for positions in of_layers}
    ops: list[Op] = []
    for position, draft in enumerate(drafts):
        step = draft.step
        key = (0, Phase.W) if step is None else (step.microbatch, step.phase)
        ops.append(
            Op(
                step=step,
                call=draft.call,
                text=str(step or draft.call),
                position=position,
                run=NONE if step is None else step.microbatch,
                place=NONE if step is None else places[step.microbatch][step.layer, step.slot],
                lane=draft.lane,
                index=index_in_lane[position],
                waits_for=waits[position],
                is_awaited=(draft.lane, index_in_lane[position]) in awaited,
                communicates=step is None or _communicates(chunks[step.microbatch], step),
                ends_forward=key[1] is Phase.F and last[key] == position,
                begins_backward=key[1] is Phase.B and first[key] == position,
                ends_backward=key[1] is Phase.B and last[key] == position,
                begins_layer=position in begins_layer,
                ends_layer=position in ends_layer,
            )
        )
    lanes = tuple(op for op in ops if op.lane == 0), tuple(op for op in ops if op.lane == 1)
    return Program(tuple(ops), lanes, rules)


def _drafts(
    steps: Sequence[Step],
    rules: Rules,
    chunks: Sequence[ChunkPlan | None],
    places: Sequence[Mapping[tuple[int | None, str], int]],
) -> list[_Draft]:
    dependencies = rules.dependencies(steps)
    drafts: list[_Draft] = []
    latest_rng = NONE
    latest_sharer = [NONE, NONE]
    for position, step in enumerate(steps):
        chunk = chunks[step.microbatch]
        assert chunk is not None
        place = chunk.places[places[step.microbatch][step.layer, step.slot]]
        lane = LANES.index(rules.streams[rules.ids[step]])
        before = [*dependencies[position]]
        if place.node is not None and place.touches_rng and step.phase is not Phase.W:
            before.append(latest_rng)
            latest_rng = position
        if place.sites:
            before.append(latest_sharer[1 - lane])
            latest_sharer[lane] = position
        drafts.append(_Draft(step=step, call=None, lane=lane, before=[b for b in before if b != NONE]))
    return drafts


def _layer_passes(drafts: Sequence[_Draft]) -> list[list[int]]:
    """The positions of each microbatch's steps on each layer, forward, and backward with weight gradients."""
    passes: dict[tuple[int, int, bool], list[int]] = {}
    for position, draft in enumerate(drafts):
        step = draft.step
        if step is not None and step.layer is not None:
            passes.setdefault((step.microbatch, step.layer, step.phase is Phase.F), []).append(position)
    return list(passes.values())


def _let_layers_end_last(drafts: Sequence[_Draft]) -> None:
    """Let the last step of a layer's pass wait for those of the other lane: what the layer holds may go after it."""
    for positions in _layer_passes(drafts):
        last = drafts[positions[-1]]
        last.before += [p for p in positions[:-1] if drafts[p].lane != last.lane][-1:]


def _with_calls(drafts: Sequence[_Draft], calls: Mapping[Call, int]) -> list[_Draft]:
    """Insert the calls; each waits for what it follows, and what it precedes waits for it."""
    of_phase = {phase: [i for i, d in enumerate(drafts) if _phase(d) is phase] for phase in Phase}
    forward, backward = of_phase[Phase.F], of_phase[Phase.B]
    begins = [positions[0] for positions in (forward, backward) if positions]
    ends_forward = [i for i in forward if not _is_end(drafts[i], POST_PROCESS)][-1:]
    ends_backward = [i for i in backward if not _is_end(drafts[i], PRE_PROCESS)][-1:]
    at: dict[int, list[Call]] = {}  # calls before each old position
    if Call.PRE_FORWARD in calls and forward:
        at.setdefault(min(begins), []).append(Call.PRE_FORWARD)
    if Call.PRE_BACKWARD in calls and backward:
        at.setdefault(backward[0], []).append(Call.PRE_BACKWARD)
    sent = NONE
    if Call.POST_FORWARD in calls and forward:
        sent = (ends_forward or forward)[-1] + 1
        at.setdefault(sent, []).append(Call.POST_FORWARD)
    if Call.POST_BACKWARD in calls and backward:
        at.setdefault(max((ends_backward or backward)[-1] + 1, sent), []).append(Call.POST_BACKWARD)
    result: list[_Draft] = []
    moved: dict[int, int] = {}
    pre: dict[Phase, int] = {}
    latest_call = NONE
    for old in range(len(drafts) + 1):
        for call in at.get(old, ()):
            follows = {Call.POST_FORWARD: ends_forward or forward, Call.POST_BACKWARD: ends_backward or backward}
            before = [moved[i] for i in follows.get(call, ())[-1:]]
            result.append(
                _Draft(step=None, call=call, lane=calls[call], before=before + [latest_call] * (latest_call != NONE))
            )
            latest_call = len(result) - 1
            pre |= {Call.PRE_FORWARD: {Phase.F: latest_call}, Call.PRE_BACKWARD: {Phase.B: latest_call}}.get(call, {})
        if old < len(drafts):
            draft = drafts[old]
            extra = [pre[phase] for phase in (_phase(draft),) if phase in pre]
            moved[old] = len(result)
            result.append(
                _Draft(step=draft.step, call=None, lane=draft.lane, before=[moved[b] for b in draft.before] + extra)
            )
    return result


def _phase(draft: _Draft) -> Phase | None:
    return None if draft.step is None else draft.step.phase


def _is_end(draft: _Draft, slot: str) -> bool:
    return draft.step is not None and draft.step.layer is None and draft.step.slot == slot


def _communicates(chunk: ChunkPlan | None, step: Step) -> bool:
    return step.layer is not None or (chunk is not None and chunk.is_tensor_parallel)


def _ends(drafts: Sequence[_Draft]) -> tuple[dict[tuple[int, Phase], int], dict[tuple[int, Phase], int]]:
    first: dict[tuple[int, Phase], int] = {}
    last: dict[tuple[int, Phase], int] = {}
    for position, draft in enumerate(drafts):
        if draft.step is not None:
            first.setdefault((draft.step.microbatch, draft.step.phase), position)
            last[draft.step.microbatch, draft.step.phase] = position
    return first, last
