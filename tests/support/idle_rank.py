"""What must hold where one rank's experts get no token (case 14)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from torch.nn import Module

IDLE: Final = ("idle-rank", "idle-rank-mtp", "idle-rank-allgather", "idle-rank-deepep")
"""The cells in which the last rank's experts get none."""


def expert_gradients(model: Module) -> list[bool | None]:
    """Of each expert's parameter, whether its gradient has anything but zeros; None where there is no gradient."""
    grads = [p.grad for name, p in model.named_parameters() if ".experts." in name]
    return [None if grad is None else bool(grad.any()) for grad in grads]


def check_idle_rank(first: Mapping[str, Any], second: Mapping[str, Any]) -> None:
    """Both ranks equal the plain run; one rank's experts have gradients, the other's have zeros, and never None; both
    issue the same collectives in the same order on each lane, dispatch and combine forward and backward among them."""
    for case in first:
        if case.endswith("collectives"):
            assert first[case] == second[case], case
            slots = {step.partition(".")[2].partition(".")[2] for lane in first[case].values() for step, _, _ in lane}
            assert slots >= {"moe_dispatch", "moe_combine"}, case
            phases = {step[0] for lane in first[case].values() for step, _, _ in lane}
            assert phases == {"F", "B"}, case
        elif case.endswith("gradients"):
            assert None not in [*first[case], *second[case]], case
            assert {any(first[case]), any(second[case])} == {True, False}, case
        else:
            assert first[case] == second[case] == [], case
