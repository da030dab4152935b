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
