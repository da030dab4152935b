"""Which neighbouring layers of a model are one logical layer of its plan."""

from __future__ import annotations

from collections.abc import Sequence

from layernodes.errors import PlanError
from layernodes.nodes.group import is_small
from layernodes.plan.layer_plan import LayerPlan

Group = bool | str | None
"""True or False, or the layer pattern with a blank between logical layers; None: as the model has it by default."""


def group_sizes(plans: Sequence[LayerPlan], symbols: Sequence[str] | None, group: Group) -> list[int]:
    """The number of neighbouring layers in each logical layer.

    Args:
        plans: the decoder's layers.
        symbols: what the model's pattern calls them (and layers behind them); None: it has no pattern.
        group: as for ``ChunkPlan.build``.

    Raises:
        PlanError: a grouping of layers that have no pattern, or text that is not the pattern with blanks.
    """
    if symbols is None:
        if group:
            raise PlanError(
                f"group={group!r} joins layers of a HybridModel, and this model's layers are whole ones; leave it out"
            )
        return [1] * len(plans)
    if isinstance(group, str):
        pattern = "".join(symbols[: len(plans)])
        words = group.split()
        if "".join(words) != pattern:
            raise PlanError(
                f"group={group!r} is not this chunk's layer pattern {pattern!r} with blanks between logical layers; "
                f"write it so, for example {_spelling(plans, symbols)!r}"
            )
        return [len(word) for word in words]
    return [1] * len(plans) if group is False else _default(plans)


def _default(plans: Sequence[LayerPlan]) -> list[int]:
    """Each logical layer ends with a layer that is more than attention or a mixer: a MoE or MLP layer, a user's own."""
    sizes: list[int] = []
    is_open = False
    for plan in plans:
        if is_open:
            sizes[-1] += 1
        else:
            sizes.append(1)
        is_open = is_small(plan.nodes)
    return sizes


def _spelling(plans: Sequence[LayerPlan], symbols: Sequence[str]) -> str:
    left = list(symbols[: len(plans)])
    words = []
    for size in _default(plans):
        words.append("".join(left[:size]))
        left = left[size:]
    return " ".join(words)
