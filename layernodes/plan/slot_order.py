"""Where a user's own slots stand among those of a layer: one rule for shapes and for plans."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection

from layernodes.errors import PlanError
from layernodes.slots import ExtraSlot, Slot


def in_order(slots: Collection[Slot], extras: Collection[ExtraSlot]) -> list[Slot | ExtraSlot]:
    """The slots in forward order, each with what follows it directly behind it.

    Extra slots that follow the same slot stand in the given order, each with its own followers before the next; how
    they are ordered otherwise does not matter.

    Args:
        slots: the layer's own, in forward order, which extra slots may follow.
        extras: the user's.

    Raises:
        PlanError: two extra slots share a name, or one follows a slot that is not there, or itself through others.
    """
    names = [extra.name for extra in extras]
    if len(set(names)) != len(names):
        raise PlanError(f"two extra slots share a name: {', '.join(names)}; give each a name of its own")
    there = [*map(str, slots), *names]
    followers: defaultdict[str, list[ExtraSlot]] = defaultdict(list)
    for extra in extras:
        if extra.after not in there:
            raise PlanError(f"extra slot {extra.name} follows {extra.after}; this layer has {', '.join(there)}")
        followers[extra.after].append(extra)
    order: list[Slot | ExtraSlot] = []
    waiting: list[Slot | ExtraSlot] = [*reversed([*slots])]
    while waiting:
        key = waiting.pop()
        order.append(key)
        waiting += reversed(followers[key if isinstance(key, Slot) else key.name])
    lost = [extra.name for extra in extras if extra not in order]
    if lost:
        raise PlanError(f"extra slots {', '.join(lost)} follow one another in a circle; let one follow a Slot")
    return order
