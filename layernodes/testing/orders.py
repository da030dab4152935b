"""Valid schedules drawn at random: topological orders of everything that the rules know of."""

from __future__ import annotations

import random
from collections import defaultdict, deque

from layernodes.plan.rules import NONE, Mode, Rules
from layernodes.plan.schedule import Schedule
from layernodes.plan.shape import ChunkShape
from layernodes.slots import Phase


def random_schedule(
    shape: ChunkShape, num_microbatches: int, rng: random.Random, mode: Mode | str = Mode.TRAIN
) -> Schedule:
    """A valid schedule of a shape; steps of pass-throughs are named or left out at random.

    Args:
        shape: the chunk's shape.
        num_microbatches: microbatches in flight.
        rng: where chance comes from; equal states give equal schedules, on every rank.
        mode: ``"train"``, or ``"forward"`` for forward steps alone.

    Raises:
        ScheduleError: a negative number of microbatches, or another mode.
    """
    rules = Rules.of(shape, num_microbatches, mode)
    present = [number for number in range(len(rules.steps)) if not rules.optional[number] or rng.random() < 0.5]
    nearest = rules.nearest(present)
    followers: dict[int, list[int]] = defaultdict(list)
    for number in present:
        followers[nearest[number]].append(number)
    waiting: dict[tuple[int | None, str], deque[int]] = defaultdict(deque)  # a module's Ws run in the order of its Bs
    ready = followers[NONE]
    order = []
    while ready:
        number = ready.pop(rng.randrange(len(ready)))
        step = rules.steps[number]
        order.append(step)
        queue = waiting[step.layer, step.slot]
        if step.phase is Phase.W:
            queue.popleft()
            ready += [queue[0]] if queue else []
        for follower in followers[number]:
            if rules.steps[follower].phase is Phase.W:
                queue.append(follower)
                ready += [follower] if len(queue) == 1 else []
            else:
                ready.append(follower)
    return Schedule(order)
