"""The oracle of ``tests.support.runs``, with deferred weight gradients: those add in the order of their W."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from layernodes import Schedule
from tests import oracle
from tests.support.compare import Snapshot
from tests.support.runs import Bench
from tests.support.strategies import plain


class DeferredBench(Bench):
    """A bench whose chunk plan defers wherever it can.

    Which parameters are deferred is the plan's own word (``describe()``); that they run in W and not in B is counted
    elsewhere.
    """

    wgrad = "auto"

    def deferred(self, *, split_combine: bool = False) -> set[str]:
        """Names of the parameters whose gradients come with W."""
        ids = {
            id(parameter)
            for plan in self.chunk(split_combine=split_combine).layers
            for node in plan.describe().nodes
            for name, parameter in plan.layer.named_parameters()
            if name in node.wgrad
        }
        return {name for name, parameter in self.model.named_parameters() if id(parameter) in ids}

    def expected(
        self, schedule: Schedule, *, split_combine: bool = False, grads_before: Mapping[str, Tensor] | None = None
    ) -> Snapshot:
        """What the oracle expects: the plain gradients of each microbatch, in the order of W or B."""
        state = {**super().expected(schedule, split_combine=split_combine, grads_before=grads_before)}
        position = {str(step): i for i, step in enumerate(schedule)}
        for name in self.deferred(split_combine=split_combine):
            total = (grads_before or {}).get(name)
            for m in self._order(name, position, split_combine):
                gradient = self.plain.grads[m][name]
                if gradient is not None:
                    total = gradient if total is None else total + gradient
            state[f"grad/{name}"] = total
        return state

    def _order(self, name: str, position: Mapping[str, int], split_combine: bool) -> list[int]:
        places = [self.place(name, split_combine=split_combine)]
        if name.startswith("mtp.") and self.cell.config.get("mtp_use_repeated_layer"):
            first, slot = places[0].split(".")
            places += [f"L{int(first[1:]) + depth}.{slot}" for depth in range(1, self.cell.mtp)]
        last = {m: max(position[f"W{m}.{place}"] for place in places) for m in range(len(self.microbatches))}
        return sorted(last, key=last.__getitem__)


class MainGradBench(DeferredBench):
    """The same, where a hook moves each gradient into ``main_grad`` in fp32, as Megatron-Core's DDP does."""

    def reset(self) -> None:
        """Main gradients at zero too, and the hooks in place."""
        super().reset()
        for parameter in self.model.parameters():
            if parameter.requires_grad:
                parameter.main_grad = torch.zeros_like(parameter, dtype=torch.float32)
                if "moved" not in parameter.__dict__:
                    parameter.moved = True
                    parameter.register_post_accumulate_grad_hook(_move)

    def run(self, schedule: Schedule, **options: Any) -> Snapshot:
        """As ``Bench.run``, with ``main_grad`` for the gradient."""
        state = {**super().run(schedule, **options)}
        for name, parameter in self.model.named_parameters():
            assert parameter.grad is None
            state[f"grad/{name}"] = parameter.main_grad.clone() if parameter.requires_grad else None
        return state

    def expected(self, schedule: Schedule, **options: Any) -> Snapshot:
        """Sums in fp32 that begin at zero."""
        grads = self.plain.grads
        self.plain.grads = [{name: None if g is None else g.float() for name, g in of_one.items()} for of_one in grads]
        trainable = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        zeros = {name: torch.zeros_like(p, dtype=torch.float32) for name, p in trainable.items()}
        try:
            return super().expected(schedule, **{**options, "grads_before": zeros})
        finally:
            self.plain.grads = grads


def _move(parameter: Any) -> None:
    parameter.main_grad.add_(parameter.grad)
    parameter.grad = None


def random_deferred_schedule(bench: DeferredBench, seed: int, *, split_combine: bool = False) -> Schedule:
    """A valid schedule with W at random legal places, drawn by the hand-written oracle."""
    shape = bench.chunk(split_combine=split_combine).shape
    texts = oracle.random_schedule(plain(shape), len(bench.microbatches), random.Random(seed))
    return Schedule.parse("\n".join(texts))
