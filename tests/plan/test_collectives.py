"""The collectives of one process group come from one stream: whoever breaks that is named, at once."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from layernodes import NodeContext, Runner, Step, StreamOrderError, schedules
from layernodes.plan.collectives import CollectiveWatch
from tests.support import toy
from tests.support.fixtures import MEGATRON_WORLD, megatron_world  # noqa: F401
from tests.support.ranks import values_on_ranks

pytestmark = MEGATRON_WORLD
_CASES = "tests.support.stream_rank_cases"


class _Group:
    """A process group as the watch knows it."""

    def __init__(self, name: str) -> None:
        self.group_name = name
        self.count = 0

    def _get_sequence_number_for_group(self) -> int:
        return self.count


def _op(text: str, lane: int, index: int = 0, waits_for: int = -1) -> Any:
    step = Step.parse(text) if "." in text else None
    return SimpleNamespace(text=text, lane=lane, step=step, index=index, waits_for=waits_for)


def _step(watch: CollectiveWatch, op: Any, *groups: _Group) -> None:
    watch.begin(op)
    for group in groups:
        group.count += 1
    watch.end(op)


class TestWatch:
    """On groups that only count."""

    def test_names_both_steps_the_group_and_the_stream(self) -> None:
        groups: Any = [_Group("quiet"), _Group("tokens")]
        watch = CollectiveWatch(groups)
        _step(watch, _op("F0.L0.moe_dispatch", 1), groups[1])
        _step(watch, _op("F0.L0.mlp", 0))
        _step(watch, _op("F0.L0.moe_combine", 1), groups[1])
        with pytest.raises(StreamOrderError) as caught:
            _step(watch, _op("B0.L0.mlp", 0), groups[1])
        error = caught.value
        assert (error.rule, error.step, error.other) == ("collectives", "B0.L0.mlp", "F0.L0.moe_dispatch")
        assert error.tensor == "tokens"
        for word in ("B0.L0.mlp", "F0.L0.moe_dispatch", "'tokens'", "comm stream"):
            assert word in str(error)

    def test_a_group_each_is_fine(self) -> None:
        groups: Any = [_Group("counts"), _Group("tokens")]
        watch = CollectiveWatch(groups)
        for _ in range(3):
            _step(watch, _op("F0.L0.pre_dispatch_computation", 0), groups[0])
            _step(watch, _op("F0.L0.moe_dispatch", 1), groups[1])

    def test_ordered_backward_steps_may_share_a_group(self) -> None:
        """As the reduction of gradients does; a later step of that lane, which nothing orders, may not."""
        groups: Any = [_Group("data")]
        watch = CollectiveWatch(groups)
        _step(watch, _op("B0.L1.moe_combine", 1, index=0), groups[0])
        _step(watch, _op("B0.L1.mlp", 0, index=0, waits_for=0), groups[0])
        _step(watch, _op("B0.L1.moe_dispatch", 1, index=1, waits_for=0), groups[0])
        with pytest.raises(StreamOrderError) as caught:
            _step(watch, _op("W0.L1.mlp", 0, index=1), groups[0])
        assert (caught.value.step, caught.value.other) == ("W0.L1.mlp", "B0.L1.moe_dispatch")

    def test_ordered_forward_steps_may_not(self) -> None:
        """A schedule of other microbatches would not order them."""
        groups: Any = [_Group("tokens")]
        watch = CollectiveWatch(groups)
        _step(watch, _op("F0.L1.moe_dispatch", 1, index=0), groups[0])
        with pytest.raises(StreamOrderError):
            _step(watch, _op("B0.L1.mlp", 0, index=0, waits_for=0), groups[0])

    def test_steps_side_by_side_are_left_out(self) -> None:
        """Whose collective it was is not known, whichever of the two began first."""
        groups: Any = [_Group("tokens")]
        for first, second in ((0, 1), (1, 0)):
            watch = CollectiveWatch(groups)
            a, b = _op("a", first), _op("b", second)
            watch.begin(a)
            watch.begin(b)
            groups[0].count += 1
            watch.end(a)
            watch.end(b)
            _step(watch, _op("c", first), groups[0])
            with pytest.raises(StreamOrderError) as caught:
                _step(watch, _op("d", second), groups[0])
            assert caught.value.other == "c"


def test_two_ranks() -> None:
    """Layers of one's own and of Megatron-Core's, inline and on threads; on both ranks, and the group serves on."""
    first, second = values_on_ranks(f"{_CASES}:both_lanes")
    for seen in (first, second):
        for streams in ("inline", "threads"):
            own = seen[f"own {streams}"]
            assert own["rule"] == "collectives"
            assert {own["step"], own["other"]} == {"F0.L0.moe_dispatch", "F0.L0.mlp"}
            assert seen[f"backward {streams}"]["rule"] == "collectives"
            assert {seen[f"backward {streams}"][key] for key in ("step", "other")} == {"F0.L0.mlp", "B0.L1.moe_combine"}
            assert seen[f"groups of their own {streams}"] == "ran"
            megatron = seen[f"megatron {streams}"]
            assert megatron["rule"] == "collectives"
            assert "F0.L0.mlp" in (megatron["step"], megatron["other"])
            assert "moe_dispatch" in megatron["step"] + megatron["other"]
        assert seen["plain bits"] == []


def test_the_recording_streams_see_them_too() -> None:
    """In one process, whatever the size of the group."""

    class Sending(toy.Send):
        def forward(self, ctx: NodeContext, *inputs: Tensor) -> Tensor:
            dist.all_reduce(torch.ones(1))
            return super().forward(ctx, *inputs)

    class Computing(toy.Middle):
        def forward(self, ctx: NodeContext, *inputs: Tensor) -> Tensor:
            dist.all_reduce(torch.ones(1))
            return super().forward(ctx, *inputs)

    chunk = toy.chunk_of(toy.toys(), moe_dispatch=Sending, mlp=Computing)
    with Runner(streams="recording") as runner:
        with pytest.raises(StreamOrderError) as caught:
            runner.run(schedules.serial(chunk.shape, 1), chunk, toy.inputs(1))
        assert (caught.value.rule, caught.value.step, caught.value.other) == (
            "collectives",
            "F0.L0.mlp",
            "F0.L0.moe_dispatch",
        )
        one_lane = toy.chunk_of(toy.toys(), moe_dispatch=Sending)
        runner.run(schedules.combined_1f1b(one_lane.shape, 2), one_lane, toy.inputs(2))
