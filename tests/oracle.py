"""A second opinion on schedules, written by hand; it imports nothing from layernodes.

It knows schedules as lists of texts and a chunk as a plain description::

    {"pre": True, "post": True, "layers": [{"slots": ["a", "b"], "optional": ["b"], "wgrad": ["a"]}, ...]}

It is slow on purpose: it compares every two steps by the sentences of the specification, and has no notion of
predecessors, ids or lines.
"""

from __future__ import annotations

import random
from collections import Counter
from functools import cache
from itertools import combinations
from typing import TypedDict


class Layer(TypedDict):
    slots: list[str]
    optional: list[str]
    wgrad: list[str]


class Chunk(TypedDict):
    pre: bool
    post: bool
    layers: list[Layer]


@cache
def split(text: str) -> tuple[str, int, str, str]:
    """Phase, microbatch, layer ("" for the ends) and slot of a step's text."""
    head, *middle, slot = text.split(".")
    return head[0], int(head[1:]), middle[0][1:] if middle else "", slot


def slots_of(chunk: Chunk) -> list[tuple[str, str]]:
    """(layer, slot) in forward order; the layer is "" for the ends."""
    result = [("", "pre_process")] if chunk["pre"] else []
    for number, layer in enumerate(chunk["layers"]):
        result += [(str(number), slot) for slot in layer["slots"]]
    return result + ([("", "post_process")] if chunk["post"] else [])


def text_of(phase: str, microbatch: int, layer: str, slot: str) -> str:
    return f"{phase}{microbatch}.L{layer}.{slot}" if layer else f"{phase}{microbatch}.{slot}"


def has_wgrad(chunk: Chunk, layer: str, slot: str) -> bool:
    return layer != "" and slot in chunk["layers"][int(layer)]["wgrad"]


def is_optional(chunk: Chunk, layer: str, slot: str) -> bool:
    return layer != "" and slot in chunk["layers"][int(layer)]["optional"]


def all_steps(chunk: Chunk, num_microbatches: int, mode: str = "train") -> list[str]:
    """Every step that may occur, in serial order."""
    result = []
    for m in range(num_microbatches):
        result += [text_of("F", m, *place) for place in slots_of(chunk)]
        if mode == "train":
            for place in reversed(slots_of(chunk)):
                result.append(text_of("B", m, *place))
                if has_wgrad(chunk, *place):
                    result.append(text_of("W", m, *place))
    return result


def must_precede(first: str, second: str, chunk: Chunk) -> bool:
    """Whether the specification orders these two steps, whatever else is in the schedule; first before second."""
    (p1, m1, l1, s1), (p2, m2, l2, s2) = split(first), split(second)
    if m1 != m2:
        return False
    line = slots_of(chunk)
    a, b = line.index((l1, s1)), line.index((l2, s2))
    if (p1, p2) == ("F", "F"):
        return a < b
    if (p1, p2) == ("B", "B"):
        return a > b
    if (p1, p2) == ("B", "W"):
        return a >= b  # its own B, and hence every B that comes before that one
    return p1 == "F" and p2 in "BW"


def faults(steps: list[str], chunk: Chunk, num_microbatches: int, mode: str = "train") -> list[str]:
    """What is wrong with a schedule, in no particular order; empty if it is valid."""
    allowed = all_steps(chunk, num_microbatches, mode)
    known = set(allowed)
    result = [f"foreign {step}" for step in steps if step not in known]
    counts = Counter(steps)
    result += [f"duplicate {step}" for step, count in counts.items() if count > 1]
    result += [
        f"missing {step}"
        for step in allowed
        if counts[step] == 0 and (split(step)[0] == "W" or not is_optional(chunk, *split(step)[2:]))
    ]
    own = [step for step in steps if step in known]
    result += [
        f"order {later} before {earlier}"
        for later, earlier in combinations(own, 2)
        if must_precede(earlier, later, chunk)
    ]
    for place in slots_of(chunk):
        turns = {
            phase: [split(step)[1] for step in own if split(step)[0] == phase and split(step)[2:] == place]
            for phase in "BW"
        }
        once = [m for m in turns["B"] if turns["B"].count(m) == turns["W"].count(m) == 1]
        if once != [m for m in turns["W"] if m in once]:
            result.append(f"queue of {place}: B {turns['B']}, W {turns['W']}")
    return result


def pair_faults(steps: list[str], forward: Chunk | None, backward: Chunk | None) -> list[str]:
    """What is wrong with a pair: F0 of one chunk, B1 and W1 of another."""
    empty: Chunk = {"pre": False, "post": False, "layers": []}
    forward, backward = forward or empty, backward or empty
    f_steps = [step for step in steps if step.startswith("F0.")]
    b_steps = [step for step in steps if step.startswith(("B1.", "W1."))]
    result = [f"foreign {step}" for step in steps if step not in f_steps + b_steps]
    result += faults(f_steps, forward, 1, "forward")
    earlier = [text_of("F", m, *place) for m in (0, 1) for place in slots_of(backward)]
    other = [step.replace("1.", "0.", 1) for step in b_steps]  # a full microbatch 0, so that only 1 is judged
    return result + faults(earlier + other + b_steps, backward, 2)


def random_schedule(chunk: Chunk, num_microbatches: int, rng: random.Random, mode: str = "train") -> list[str]:
    """A valid schedule: a random topological order, with some of the optional steps left out at random."""
    remaining = [
        step
        for step in all_steps(chunk, num_microbatches, mode)
        if split(step)[0] == "W" or not is_optional(chunk, *split(step)[2:]) or rng.random() < 0.5
    ]
    before = {
        step: {other for other in remaining if other != step and must_precede(other, step, chunk)} for step in remaining
    }
    queues: dict[tuple[str, str], list[int]] = {}
    result: list[str] = []
    done: set[str] = set()
    while remaining:
        ready = []
        for step in remaining:
            phase, m, *place = split(step)
            if before[step] <= done and (phase != "W" or queues[place[0], place[1]][0] == m):
                ready.append(step)
        step = rng.choice(ready)
        phase, m, *place = split(step)
        if phase == "B":
            queues.setdefault((place[0], place[1]), []).append(m)
        if phase == "W":
            queues[place[0], place[1]].pop(0)
        remaining.remove(step)
        done.add(step)
        result.append(step)
    return result


class Worked(TypedDict, total=False):
    """A timeline worked out by hand: what goes in, and every figure that must come out.

    Slots are short here: a pre_dispatch_computation, d moe_dispatch, m mlp, c moe_combine, t mtp_post_process.
    """

    name: str
    steps: str
    pair: bool
    costs: dict[str, dict[str, tuple[int, ...]]]  # by kind and slot: F, B, W, activation bytes, wgrad bytes
    layers: dict[int, dict[str, tuple[int, ...]]]  # the same for single layers
    ends: dict[str, tuple[int, ...]]
    slowdown: int
    comm_slowdown: int
    queues: int
    spans: str  # start-end of each step, in the order of the steps
    makespan: int
    busy: tuple[int, int]  # compute, communication
    exposed: dict[str, tuple[int, str]]  # seconds, and who waits
    critical: str
    peak: tuple[int, int]  # bytes, slots


LONG = {
    "a": "pre_dispatch_computation",
    "d": "moe_dispatch",
    "m": "mlp",
    "c": "moe_combine",
    "t": "mtp_post_process",
}


def long(text: str) -> str:
    """Step texts with their slots spelt out."""
    parts = [word.rpartition(".") for word in text.split()]
    return " ".join(f"{head}.{LONG.get(slot, slot)}" for head, _, slot in parts)


_TRAIN = {
    "moe": {"a": (2, 3, 1, 10, 7), "d": (3, 3, 0, 20, 0), "m": (4, 5, 2, 30, 5), "c": (1, 1, 0, 40, 0)},
    "dense": {"a": (2, 3, 1, 10, 7), "m": (4, 5, 2, 30, 5)},
}
_NO_COMBINE = {"moe": {"a": (1,), "d": (5,), "m": (2,)}}

WORKED: list[Worked] = [
    {
        "name": "forward of one layer: nothing overlaps",
        "steps": "F0.L0.a F0.L0.d F0.L0.m F0.L0.c",
        "costs": _TRAIN,
        "spans": "0-2 2-5 5-9 9-10",
        "makespan": 10,
        "busy": (6, 4),
        "exposed": {"F0.L0.d": (3, "F0.L0.m"), "F0.L0.c": (1, "end")},
        "critical": "F0.L0.a F0.L0.d F0.L0.m F0.L0.c",
        "peak": (0, 0),
    },
    {
        "name": "weight gradients with B",
        "steps": "F0.L0.a F0.L0.d F0.L0.m F0.L0.c B0.L0.c B0.L0.m B0.L0.d B0.L0.a",
        "costs": _TRAIN,
        "spans": "0-2 2-5 5-9 9-10 10-11 11-18 18-21 21-25",
        "makespan": 25,
        "busy": (17, 8),
        "exposed": {
            "F0.L0.d": (3, "F0.L0.m"),
            "F0.L0.c": (1, "B0.L0.m"),
            "B0.L0.c": (1, "B0.L0.m"),
            "B0.L0.d": (3, "B0.L0.a"),
        },
        "critical": "F0.L0.a F0.L0.d F0.L0.m F0.L0.c B0.L0.c B0.L0.m B0.L0.d B0.L0.a",
        "peak": (100, 4),
    },
    {
        "name": "weight gradients at the end",
        "steps": "F0.L0.a F0.L0.d F0.L0.m F0.L0.c B0.L0.c B0.L0.m B0.L0.d B0.L0.a W0.L0.m W0.L0.a",
        "costs": _TRAIN,
        "spans": "0-2 2-5 5-9 9-10 10-11 11-16 16-19 19-22 22-24 24-25",
        "makespan": 25,
        "busy": (17, 8),
        "exposed": {
            "F0.L0.d": (3, "F0.L0.m"),
            "F0.L0.c": (1, "B0.L0.m"),
            "B0.L0.c": (1, "B0.L0.m"),
            "B0.L0.d": (3, "B0.L0.a"),
        },
        "critical": "F0.L0.a F0.L0.d F0.L0.m F0.L0.c B0.L0.c B0.L0.m B0.L0.d B0.L0.a W0.L0.m W0.L0.a",
        "peak": (100, 4),
    },
    {
        "name": "weight gradients beside the next communication",
        "steps": "F0.L0.a F0.L0.d F0.L0.m F0.L0.c B0.L0.c B0.L0.m B0.L0.d W0.L0.m B0.L0.a W0.L0.a",
        "costs": _TRAIN,
        "spans": "0-2 2-5 5-9 9-10 10-11 11-16 16-19 16-18 19-22 22-23",
        "makespan": 23,
        "busy": (17, 8),
        "exposed": {
            "F0.L0.d": (3, "F0.L0.m"),
            "F0.L0.c": (1, "B0.L0.m"),
            "B0.L0.c": (1, "B0.L0.m"),
            "B0.L0.d": (1, "B0.L0.a"),
        },
        "critical": "F0.L0.a F0.L0.d F0.L0.m F0.L0.c B0.L0.c B0.L0.m B0.L0.d B0.L0.a W0.L0.a",
        "peak": (100, 4),
    },
    {
        "name": "two forwards interleaved over two layers of equal slots",
        "steps": "F0.L0.a F0.L0.d F1.L0.a F1.L0.d F0.L0.m F0.L0.c F1.L0.m F1.L0.c "
        "F0.L1.a F0.L1.d F1.L1.a F1.L1.d F0.L1.m F0.L1.c F1.L1.m F1.L1.c",
        "costs": {"moe": {"a": (2,), "d": (2,), "m": (2,), "c": (2,)}},
        "spans": "0-2 2-4 2-4 4-6 4-6 6-8 6-8 8-10 8-10 10-12 10-12 12-14 12-14 14-16 14-16 16-18",
        "makespan": 18,
        "busy": (16, 16),
        "exposed": {"F1.L1.c": (2, "end")},
        "critical": "F0.L0.a F1.L0.a F1.L0.d F1.L0.m F1.L0.c F1.L1.a F1.L1.d F1.L1.m F1.L1.c",
        "peak": (0, 0),
    },
    {
        "name": "a stream is a FIFO: what is ready waits behind what stands before it",
        "steps": "F0.L0.a F1.L0.a F1.L0.d F0.L0.d F0.L0.m F1.L0.m F0.L0.c F1.L0.c",
        "costs": {"moe": {"a": (1,), "d": (4,), "m": (2,), "c": (1,)}},
        "spans": "0-1 1-2 2-6 6-10 10-12 12-14 12-13 14-15",
        "makespan": 15,
        "busy": (6, 10),
        "exposed": {"F1.L0.d": (4, "F0.L0.m"), "F0.L0.d": (4, "F0.L0.m"), "F1.L0.c": (1, "end")},
        "critical": "F0.L0.a F1.L0.a F1.L0.d F0.L0.d F0.L0.m F1.L0.m F1.L0.c",
        "peak": (0, 0),
    },
    {
        "name": "a pair in Megatron-Core's order: everything is hidden",
        "steps": "B1.L0.c F0.L0.a B1.L0.m F0.L0.d W1.L0.m B1.L0.d F0.L0.m F0.L0.c B1.L0.a W1.L0.a",
        "pair": True,
        "costs": _TRAIN,
        "spans": "0-1 0-2 2-7 2-5 7-9 7-10 9-13 13-14 13-16 16-17",
        "makespan": 17,
        "busy": (17, 8),
        "exposed": {},
        "critical": "F0.L0.a B1.L0.m W1.L0.m F0.L0.m B1.L0.a W1.L0.a",
        "peak": (117, 5),
    },
    {
        "name": "a dense and a MoE layer between the chunk's ends",
        "steps": "F0.pre_process F0.L0.a F0.L0.m F0.L1.a F0.L1.d F0.L1.m F0.L1.c F0.post_process "
        "B0.post_process B0.L1.c B0.L1.m B0.L1.d B0.L1.a B0.L0.m B0.L0.a B0.pre_process",
        "costs": {
            "dense": {"a": (2, 2, 2, 1, 0), "m": (3, 3, 3, 2, 0)},
            "moe": {"a": (1, 1, 1, 3, 0), "d": (2, 2), "m": (3, 3, 3, 4, 0), "c": (2, 2)},
        },
        "ends": {"pre_process": (1, 1, 0, 5), "post_process": (2, 2, 0, 6)},
        "spans": "0-1 1-3 3-6 6-7 7-9 9-12 12-14 14-16 16-18 18-20 20-26 26-28 28-30 30-36 36-40 40-41",
        "makespan": 41,
        "busy": (33, 8),
        "exposed": {
            "F0.L1.d": (2, "F0.L1.m"),
            "F0.L1.c": (2, "F0.post_process"),
            "B0.L1.c": (2, "B0.L1.m"),
            "B0.L1.d": (2, "B0.L1.a"),
        },
        "critical": "F0.pre_process F0.L0.a F0.L0.m F0.L1.a F0.L1.d F0.L1.m F0.L1.c F0.post_process "
        "B0.post_process B0.L1.c B0.L1.m B0.L1.d B0.L1.a B0.L0.m B0.L0.a B0.pre_process",
        "peak": (21, 8),
    },
    {
        "name": "three microbatches behind a slow link",
        "steps": "F0.L0.a F0.L0.d F1.L0.a F1.L0.d F2.L0.a F2.L0.d F0.L0.m F1.L0.m F2.L0.m",
        "costs": _NO_COMBINE,
        "spans": "0-1 1-6 1-2 6-11 2-3 11-16 6-8 11-13 16-18",
        "makespan": 18,
        "busy": (9, 15),
        "exposed": {"F0.L0.d": (3, "F0.L0.m"), "F1.L0.d": (3, "F1.L0.m"), "F2.L0.d": (3, "F2.L0.m")},
        "critical": "F0.L0.a F0.L0.d F1.L0.d F2.L0.d F2.L0.m",
        "peak": (0, 0),
    },
    {
        "name": "the same from one hardware queue: launching waits for the start of the step before",
        "steps": "F0.L0.a F0.L0.d F1.L0.a F1.L0.d F2.L0.a F2.L0.d F0.L0.m F1.L0.m F2.L0.m",
        "costs": _NO_COMBINE,
        "queues": 1,
        "spans": "0-1 1-6 1-2 6-11 6-7 11-16 11-13 13-15 16-18",
        "makespan": 18,
        "busy": (9, 15),
        "exposed": {"F0.L0.d": (4, "F2.L0.a"), "F1.L0.d": (4, "F0.L0.m"), "F2.L0.d": (1, "F2.L0.m")},
        "critical": "F0.L0.a F0.L0.d F1.L0.d F2.L0.d F2.L0.m",
        "peak": (0, 0),
    },
    {
        "name": "one hardware queue on the critical path: F2's attention is held up by a launch alone",
        "steps": "F0.L0.a F0.L0.d F1.L0.a F1.L0.d F2.L0.a",
        "costs": {"moe": {"a": (6,), "d": (8,)}},
        "queues": 1,
        "spans": "0-6 6-14 6-12 14-22 14-20",
        "makespan": 22,
        "busy": (18, 16),
        "exposed": {"F0.L0.d": (2, "F2.L0.a"), "F1.L0.d": (2, "end")},
        "critical": "F0.L0.a F0.L0.d F1.L0.d",
        "peak": (0, 0),
    },
    {
        "name": "computation at half speed while communication runs",
        "steps": "F0.L0.a F0.L0.d F1.L0.a F1.L0.d F0.L0.m F1.L0.m",
        "costs": {"moe": {"a": (4,), "d": (2,), "m": (2,)}},
        "slowdown": 2,
        "spans": "0-4 4-6 4-9 9-11 9-12 12-14",
        "makespan": 14,
        "busy": (14, 4),
        "exposed": {},
        "critical": "F0.L0.a F1.L0.a F0.L0.m F1.L0.m",
        "peak": (0, 0),
    },
    {
        "name": "both at half speed beside each other: an exchange of 2 s beside 1 s of work takes 3 s, the work 2 s",
        "steps": "F0.L0.a F0.L0.d F1.L0.a F1.L0.d F0.L0.m F1.L0.m",
        "costs": {"moe": {"a": (1,), "d": (2,), "m": (5,)}},
        "slowdown": 2,
        "comm_slowdown": 2,
        # d0 1-4: until 3 beside a1 at half speed (1 of 2 s done), then alone. d1 4-8 beside m0, of which 2 of 5 s are
        # done at 8; 3 more alone until 11.
        "spans": "0-1 1-4 1-3 4-8 4-11 11-16",
        "makespan": 16,
        "busy": (15, 7),
        "exposed": {"F0.L0.d": (1, "F0.L0.m")},
        "critical": "F0.L0.a F0.L0.d F0.L0.m F1.L0.m",
        "peak": (0, 0),
    },
    {
        "name": "two microbatches forward, then backward, with W",
        "steps": "F0.L0.a F0.L0.d F1.L0.a F1.L0.d F0.L0.m F0.L0.c F1.L0.m F1.L0.c B0.L0.c B1.L0.c B0.L0.m B0.L0.d "
        "B1.L0.m B1.L0.d W0.L0.m B0.L0.a W1.L0.m B1.L0.a W0.L0.a W1.L0.a",
        "costs": {
            "moe": {"a": (1, 2, 1, 10, 7), "d": (2, 2, 0, 20), "m": (2, 3, 2, 30, 5), "c": (1, 1, 0, 40)},
        },
        "spans": "0-1 1-3 1-2 3-5 3-5 5-6 5-7 7-8 8-9 9-10 9-12 12-14 12-15 15-17 15-17 17-19 19-21 21-23 23-24 24-25",
        "makespan": 25,
        "busy": (22, 12),
        "exposed": {"F0.L0.d": (1, "F0.L0.m"), "F1.L0.c": (1, "B0.L0.m"), "B0.L0.c": (1, "B0.L0.m")},
        "critical": "F0.L0.a F0.L0.d F1.L0.d F1.L0.m F1.L0.c B0.L0.c B0.L0.m B1.L0.m W0.L0.m B0.L0.a W1.L0.m B1.L0.a "
        "W0.L0.a W1.L0.a",
        "peak": (200, 8),
    },
    {
        "name": "an MTP layer",
        "steps": "F0.L0.a F0.L0.d F0.L0.m F0.L0.c F0.L0.t B0.L0.t B0.L0.c B0.L0.m B0.L0.d B0.L0.a",
        "costs": {"moe": {"a": (1, 1), "d": (2, 2), "m": (3, 3), "c": (1, 1), "t": (2, 4)}},
        "spans": "0-1 1-3 3-6 6-7 7-9 9-13 13-14 14-17 17-19 19-20",
        "makespan": 20,
        "busy": (14, 6),
        "exposed": {
            "F0.L0.d": (2, "F0.L0.m"),
            "F0.L0.c": (1, "F0.L0.t"),
            "B0.L0.c": (1, "B0.L0.m"),
            "B0.L0.d": (2, "B0.L0.a"),
        },
        "critical": "F0.L0.a F0.L0.d F0.L0.m F0.L0.c F0.L0.t B0.L0.t B0.L0.c B0.L0.m B0.L0.d B0.L0.a",
        "peak": (0, 5),
    },
    {
        "name": "one layer with costs of its own, reached while the other microbatch still communicates",
        "steps": "F0.L0.a F0.L0.d F0.L0.m F0.L0.c F0.L1.a F1.L0.a F0.L1.d F1.L0.d F0.L1.m F1.L0.m F0.L1.c",
        "costs": {"moe": {"a": (1,), "d": (1,), "m": (1,), "c": (1,)}},
        "layers": {1: {"m": (10,), "d": (4,)}},
        "spans": "0-1 1-2 2-3 3-4 4-5 5-6 5-9 9-10 9-19 19-20 19-20",
        "makespan": 20,
        "busy": (15, 8),
        "exposed": {"F0.L0.d": (1, "F0.L0.m"), "F0.L0.c": (1, "F0.L1.a"), "F0.L1.d": (3, "F0.L1.m")},
        "critical": "F0.L0.a F0.L0.d F0.L0.m F0.L0.c F0.L1.a F0.L1.d F0.L1.m F0.L1.c",
        "peak": (0, 0),
    },
]
"""Sixteen timelines worked out by hand."""
