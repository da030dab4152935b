"""A real model in every slot of which a fault can be planted, forward, backward and in a deferred weight gradient."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from typing import Any

from torch import Tensor

from layernodes import (
    ChunkPlan,
    DispatchNode,
    ExpertNode,
    ExtraSlot,
    MTPPostNode,
    NodeContext,
    PreDispatchNode,
    ScheduleNode,
    Slot,
    Step,
    StreamType,
)
from layernodes.nodes.combine import CombineExchangeNode, CombineNode, PostCombineNode
from tests.support.configs import by_name
from tests.support.deferred_runs import DeferredBench
from tests.support.wire import wired

OWN = ExtraSlot("own", after=Slot.MLP, stream=StreamType.COMM)


class Planted(ValueError):
    """The fault."""


class Fuse:
    """Raises in the step that it is armed for, in whatever the step runs."""

    def __init__(self) -> None:
        self.armed: str | None = None
        self.raised_at: list[float] = []
        self._running: dict[int, str] = {}

    def begin(self, step: Step) -> None:
        """The runner's ``before_step``: this thread now runs ``step``."""
        self._running[threading.get_ident()] = str(step)

    def pass_by(self) -> None:
        """Raise if this thread runs the step."""
        if self.armed is not None and self._running.get(threading.get_ident()) == self.armed:
            self.raised_at.append(time.monotonic())
            raise Planted(self.armed)


def _wired(output: Any, fuse: Fuse) -> Any:
    if isinstance(output, tuple):
        return _wired(output[0], fuse), *output[1:]
    return wired(output, fuse.pass_by)


def _armed(base: type[Any], fuse: Fuse) -> type[Any]:
    class Armed(base):  # type: ignore[misc]
        def forward(self, ctx: NodeContext, *inputs: Tensor) -> Any:
            fuse.pass_by()
            return _wired(super().forward(ctx, *inputs), fuse)

    return Armed


class _Passing(ScheduleNode):
    slot = OWN
    stream = StreamType.COMM

    def __init__(self, layer: Any) -> None:
        pass

    def forward(self, ctx: NodeContext, *inputs: Tensor) -> Tensor:
        return inputs[0] * 1.0

    def touches_rng(self) -> bool:
        return False


class FaultBench(DeferredBench):
    """A dense and a latent MoE layer, an MTP layer, a slot of one's own in each, weight gradients deferred."""

    def __init__(self) -> None:
        super().__init__(replace(by_name("mtp-latent-ep1"), layers="DM", num_microbatches=2, seq=4))
        self.fuse = Fuse()
        self.model.embedding.register_forward_hook(self._pass_by)
        self.model.output_layer.register_forward_hook(self._pass_by)
        for parameter in self.model.parameters():
            parameter.register_post_accumulate_grad_hook(lambda _: self.fuse.pass_by())

    def _pass_by(self, module: Any, inputs: Any, output: Any) -> Any:
        self.fuse.pass_by()
        return _wired(output, self.fuse)

    def chunk(self, *, split_combine: bool = False) -> ChunkPlan:
        """The chunk plan with a fuse in every slot, built once."""
        if split_combine not in self._chunks:
            kinds: list[type[Any]] = [PreDispatchNode, DispatchNode, ExpertNode, MTPPostNode, _Passing]
            kinds += [CombineExchangeNode, PostCombineNode] if split_combine else [CombineNode]
            nodes: dict[Any, Any] = {kind.slot: _armed(kind, self.fuse) for kind in kinds}
            self._chunks[split_combine] = ChunkPlan.build(
                self.model, nodes=nodes, split_combine=split_combine, wgrad="auto"
            )
        return self._chunks[split_combine]
