"""What each rank does in ``tests/plan/test_profile.py``."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

import layernodes
from layernodes.plan.schedule import Schedule
from layernodes.plan.timeline import Interval, Timeline
from layernodes.slots import StreamType
from tests.support.configs import by_name
from tests.support.runs import Bench
from tests.support.toy import chunk_of, inputs, toys
from tests.support.virtual import VirtualStreams
from tests.support.world import use_layout

COMM = ("moe_dispatch", "moe_combine")


def profiles(seconds: list[dict[str, list[float]]], name: str) -> dict[str, Any]:
    """Both of the cases below."""
    return {"toy": _agreed_costs(seconds), **_real_costs(name)}


def _agreed_costs(seconds: list[dict[str, list[float]]]) -> str:
    """The costs, as JSON, of a toy layer whose steps take ``seconds[rank][step]``, run by run."""
    mine = seconds[dist.get_rank()]

    def timeline_of(number: int, schedule: Schedule) -> Timeline:
        at, intervals = 0.0, []
        for step in schedule:
            key = f"{step.phase}.{step.slot}"
            stream = StreamType.COMM if step.slot in COMM else StreamType.COMPUTE
            intervals.append(Interval(step, stream, at, at + mine[key][number // 2]))
            at = intervals[-1].end
        return Timeline(tuple(intervals))

    costs = layernodes.profile(
        chunk_of(toys(1)),
        inputs(1)[0],
        repetitions=3,
        warmup=0,
        streams=VirtualStreams(timeline_of),
        group=dist.group.WORLD,
    )
    return costs.to_json()


def _real_costs(name: str) -> dict[str, Any]:
    """Costs of a real model on threads, agreed over the ranks that exchange tokens; and what it leaves behind."""
    cell = by_name(name)
    use_layout(cell)
    bench = Bench(cell)
    bench.reset()
    costs = layernodes.profile(bench.chunk(), bench.batches()[0], repetitions=2, warmup=1, streams="threads")
    return {"real": costs.to_json(), "gradients": [n for n, p in bench.model.named_parameters() if p.grad is not None]}
