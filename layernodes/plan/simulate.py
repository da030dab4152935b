"""Predicts when each step of a schedule runs.

Contract, the same as the runner's: a stream runs its steps in the order of the schedule, one at a time; a step starts
as soon as its stream is free and its predecessors in the ``Rules`` are done::

    start(step) = max(end of the step before it on its stream, ends of its predecessors)
    end(step)   = start(step) + seconds(step)

With ``hardware_queues=1`` a step also never starts before the step launched before it has started.

With ``compute_slowdown = s``, a step of the compute stream progresses at the rate 1 / s at every moment at which a
step of the communication stream runs, and at the rate 1 otherwise; with ``communication_slowdown``, one of the
communication stream beside a step of the compute stream. A step of ``d`` seconds that runs beside the other stream for
``o`` of its seconds thus ends ``d + o * (1 - 1 / s)`` after its start.

Results depend on nothing but the arguments; time and memory are linear in the number of steps.
"""

from __future__ import annotations

from collections.abc import Sequence

from layernodes.plan.arguments import check_argument
from layernodes.plan.costs import CostModel, SlotCost
from layernodes.plan.infer import infer_rules, rules_of_shape
from layernodes.plan.rules import Mode, Rules
from layernodes.plan.schedule import PairSchedule, Schedule
from layernodes.plan.shape import ChunkShape
from layernodes.plan.timeline import Interval, Timeline
from layernodes.plan.validate import check_part
from layernodes.slots import Phase, StreamType

Spans = list[tuple[float, float]]


def simulate(
    schedule: Schedule | PairSchedule,
    costs: CostModel,
    shape: ChunkShape | None = None,
    *,
    backward_shape: ChunkShape | None = None,
) -> Timeline:
    """Predict the timeline of a schedule or pair.

    Parts of a schedule, such as ``schedule[:100]``, are fine; what their steps would wait for outside is done. A part
    of a schedule with deferred weight gradients needs ``shape``: where it ends before the ``W`` of a slot, its steps do
    not show that the slot's ``B`` leaves them to it.

    Args:
        schedule: the schedule; steps in an order that may run.
        costs: what each step costs.
        shape: shape of the chunk, of a pair's forward chunk. None: kinds of layers, deferred slots and streams are
            read off the steps (``infer_rules``), which is right where layers are ``"moe"`` or ``"dense"`` and their
            pass-throughs are left out, as in all built-in schedules.
        backward_shape: shape of a pair's backward chunk; None: ``shape``.

    Returns:
        One interval a step, in the order of the schedule, with the bytes that it acquires and releases.

    Raises:
        ScheduleError: a step is foreign, there twice, or stands before one that it must come after.
        CostError: a step has no cost.
    """
    check_argument("schedule", schedule, Schedule, PairSchedule)
    check_argument("costs", costs, CostModel)
    if shape is None and backward_shape is None:
        rules = infer_rules(schedule, costs.stream_of)
    else:
        rules = rules_of_shape(schedule, shape, backward_shape)
    check_part(schedule.steps, rules, but="cannot simulate: ")
    return simulate_steps(schedule, costs, rules)


def simulate_steps(schedule: Schedule | PairSchedule, costs: CostModel, rules: Rules) -> Timeline:
    """The timeline of steps that are known to be in an order that may run; for callers that hold the rules.

    Raises:
        CostError: a step has no cost.
    """
    tables = {phase: {} if shape is None else costs.table(shape) for phase, shape in rules.shapes.items()}
    deferred = {
        (layer, slot.name)
        for shape in (rules.shapes[Phase.W],)
        if shape is not None
        for layer, slot in shape.places()
        if slot.wgrad
    }
    steps = schedule.steps
    cost_of: list[SlotCost] = [tables[step.phase][step.layer, step.slot] for step in steps]
    defers = [(step.layer, step.slot) in deferred for step in steps]
    seconds = [
        cost.seconds(step.phase, deferred=later) for step, cost, later in zip(steps, cost_of, defers, strict=True)
    ]
    streams = [rules.streams[rules.ids[step]] for step in steps]
    dependencies = rules.dependencies(steps)
    is_comm = [stream is StreamType.COMM for stream in streams]
    one_queue = costs.hardware_queues == 1
    if costs.has_slowdown:
        slowdowns = (costs.compute_slowdown, costs.communication_slowdown)
        spans = _run_at_two_rates(seconds, is_comm, dependencies, one_queue=one_queue, slowdowns=slowdowns)
    else:
        spans = _run_at_one_rate(seconds, is_comm, dependencies, one_queue=one_queue)
    retains = rules.mode is not Mode.FORWARD
    intervals = tuple(
        Interval(
            step,
            stream,
            start,
            end,
            cost.acquires(step.phase, deferred=later) if retains else 0,
            cost.releases(step.phase) if retains else 0,
        )
        for step, stream, (start, end), cost, later in zip(steps, streams, spans, cost_of, defers, strict=True)
    )
    return Timeline(intervals, dependencies, costs.hardware_queues, rules=rules)


def _run_at_one_rate(
    seconds: Sequence[float],
    is_comm: Sequence[bool],
    dependencies: Sequence[Sequence[int]],
    *,
    one_queue: bool,
) -> Spans:
    """Start and end of each step where nothing is slowed down."""
    spans: Spans = []
    free = [0.0, 0.0]
    launched = 0.0
    for duration, comm, before in zip(seconds, is_comm, dependencies, strict=True):
        start = free[comm]
        for position in before:
            start = max(start, spans[position][1])
        if one_queue:
            start = launched = max(start, launched)
        end = free[comm] = start + duration
        spans.append((start, end))
    return spans


def _run_at_two_rates(
    seconds: Sequence[float],
    is_comm: Sequence[bool],
    dependencies: Sequence[Sequence[int]],
    *,
    one_queue: bool,
    slowdowns: tuple[float, float],
) -> Spans:
    """Start and end of each step, found by going from event to event; slow-downs of computation and communication.

    An event is a start or an end; between two events neither stream's rate changes.
    """
    count = len(seconds)
    lanes = [[p for p in range(count) if not is_comm[p]], [p for p in range(count) if is_comm[p]]]
    turn = [0, 0]
    running: list[int | None] = [None, None]
    work_left = [0.0, 0.0]
    start, end = [0.0] * count, [0.0] * count
    started, done = bytearray(count), bytearray(count)
    now, ended = 0.0, 0
    while ended < count:
        # A step that takes no time may let one of the other stream start, so look until nothing more starts.
        looking = True
        while looking:
            looking = False
            for lane in (0, 1):
                if running[lane] is not None or turn[lane] == len(lanes[lane]):
                    continue
                step = lanes[lane][turn[lane]]
                if not all(done[p] for p in dependencies[step]) or (one_queue and step and not started[step - 1]):
                    continue
                turn[lane] += 1
                running[lane], start[step], started[step] = step, now, 1
                work_left[lane] = seconds[step]
                looking = True
        factors = slowdowns if None not in running else (1.0, 1.0)
        ends = [
            float("inf") if step is None else now + left * factor
            for step, left, factor in zip(running, work_left, factors, strict=True)
        ]
        until = min(ends)
        for lane, step_over in enumerate(running):
            if step_over is None:
                continue
            if ends[lane] == until:
                end[step_over], done[step_over], running[lane] = until, 1, None
                ended += 1
            else:
                work_left[lane] -= (until - now) / factors[lane]
        now = until
    return list(zip(start, end, strict=True))
