"""The recording streams flag what is out of order, and pass what is not."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar
from unittest import mock

import pytest
import torch
from torch import Tensor

from layernodes import (
    NodeContext,
    RecordingStreams,
    RecordKind,
    Runner,
    Schedule,
    ScheduleNode,
    Slot,
    StreamOrderError,
    StreamType,
    schedules,
)
from layernodes.lane import Lane
from layernodes.plan.program import Op
from layernodes.state import HandoffMap
from layernodes.streams import NO_WAIT
from tests.support import toy
from tests.support.built_ins import check_built_ins
from tests.support.cells import is_ordered
from tests.support.configs import CELLS, by_name
from tests.support.fixtures import MEGATRON_WORLD, megatron_world  # noqa: F401
from tests.support.full import FULL
from tests.support.runs import Bench, random_schedule

pytestmark = MEGATRON_WORLD
_CELLS = [c for c in CELLS if c.world_size == 1 and not is_ordered(c) and "expert-bias-padding" not in c.name]


def _run(chunk: Any, streams: Any, schedule: Schedule | None = None, count: int = 2) -> None:
    with Runner(streams=streams) as runner:
        runner.run(schedule or schedules.combined_1f1b(chunk.shape, count), chunk, toy.inputs(count))


class _WithoutWait:
    """Recording streams from whose program one wait is missing."""

    def __init__(self, text: str) -> None:
        self.recording = RecordingStreams()
        self._text = text

    def run(self, tasks: Any, perform: Callable[[Op, Lane | None], None]) -> Any:
        less = [dataclasses.replace(op, waits_for=NO_WAIT) if op.text == self._text else op for op in tasks]
        return self.recording.run(less, perform)


class TestBuiltIns:
    """What the package brings runs clean, with the bits of the inline streams."""

    @pytest.mark.parametrize("cell", _CELLS[::9], ids=lambda cell: cell.name)
    def test_cells(self, cell: Any) -> None:
        bench = Bench(cell)
        count = len(bench.microbatches)
        for split_combine in (False, True):
            shape = bench.chunk(split_combine=split_combine).shape
            for schedule in (
                schedules.combined_1f1b(shape, count),
                schedules.forward_forward(shape, count),
                random_schedule(bench, 5, split_combine=split_combine),
            ):
                assert bench.check(schedule, streams="recording", split_combine=split_combine) == []

    @pytest.mark.parametrize("wgrad", [False, True])
    @pytest.mark.parametrize(
        "name", ["mtp-latent-ep1", "mixed-ep1", *(["four-layers-ep1", "alltoall-shared-ep1"] if FULL else [])]
    )
    def test_every_built_in(self, name: str, wgrad: bool) -> None:
        """Serial, combined with and without early release, forwards together, W at each of its places, forward only."""
        assert check_built_ins(by_name(name), streams="recording", wgrad=wgrad) == {}

    def test_the_chunk_state_is_handed_on(self) -> None:
        """What pre-process makes for all layers is no undeclared tensor: rotary embeddings that nothing has cached."""
        bench = Bench(by_name("alltoall-moe-ep1"))
        bench.model.rotary_pos_emb = copy.copy(bench.model.rotary_pos_emb)  # Megatron-Core caches by the module
        schedule = schedules.combined_1f1b(bench.chunk().shape, len(bench.microbatches))
        streams = RecordingStreams()
        assert bench.check(schedule, streams=streams) == []
        made = {r.storage for r in streams.records if r.kind is RecordKind.WRITE and r.step == "F0.pre_process"}
        read = {r.storage for r in streams.records if r.kind is RecordKind.READ and r.step.startswith("F1.L1.")}
        assert made & read

    def test_toy_layers_and_records(self) -> None:
        streams = RecordingStreams()
        _run(toy.chunk_of(toy.toys()), streams)
        kinds = {record.kind for record in streams.records}
        assert kinds == set(RecordKind)
        launches = [record.step for record in streams.records if record.kind is RecordKind.LAUNCH]
        assert launches[:2] == ["F0.L0.pre_dispatch_computation", "F0.L0.moe_dispatch"]
        releases = [record for record in streams.records if record.kind is RecordKind.RELEASE]
        assert {record.step.partition(".")[2] for record in releases} >= {"L0.moe_dispatch", "L1.moe_dispatch"}
        waits = {(r.step, r.subject) for r in streams.records if r.kind is RecordKind.WAIT}
        assert ("F0.L0.moe_dispatch", "F0.L0.pre_dispatch_computation") in waits


class TestFlags:
    """Each kind of fault is flagged at its place."""

    @pytest.mark.parametrize(
        ("step", "other"),
        [
            ("F0.L0.moe_dispatch", "F0.L0.pre_dispatch_computation"),
            ("F0.L1.mlp", "F0.L1.moe_dispatch"),
            ("F1.L1.moe_combine", "F1.L1.mlp"),
            ("B0.L1.mlp", "B0.L1.moe_combine"),
            ("B1.L0.pre_dispatch_computation", "B1.L0.moe_dispatch"),
        ],
    )
    def test_a_removed_wait(self, step: str, other: str) -> None:
        with pytest.raises(StreamOrderError) as caught:
            _run(toy.chunk_of(toy.toys()), _WithoutWait(step))
        error = caught.value
        assert error.step == step
        assert error.other == other
        assert error.rule in ("order", "reuse", "released")
        assert step in str(error)
        assert other in str(error)
        assert error.tensor in str(error)

    def test_every_removed_wait(self) -> None:
        """Each wait of a program is needed: without it the recording flags something."""
        chunk = toy.chunk_of(toy.toys())
        for schedule in (schedules.forward_forward(chunk.shape, 3), schedules.combined_1f1b(chunk.shape, 3)):
            streams = RecordingStreams()
            _run(chunk, streams, schedule, 3)
            waits = [record.step for record in streams.records if record.kind is RecordKind.WAIT]
            unflagged = []
            for step in waits:
                try:
                    _run(chunk, _WithoutWait(step), schedule, 3)
                    unflagged.append(step)
                except StreamOrderError:
                    pass
            assert not unflagged, (unflagged, len(waits))

    def test_an_early_release(self) -> None:
        """A storage given back while autograd still holds it."""
        chunk = toy.chunk_of(toy.toys())
        with (
            mock.patch("layernodes.release._may_release_input", lambda outer, inners, i: True),
            pytest.raises(StreamOrderError) as caught,
        ):
            _run(chunk, RecordingStreams())
        assert caught.value.rule == "released"
        assert caught.value.step == "B0.L1.mlp"
        assert caught.value.other == "F0.L1.mlp"

    def test_a_node_that_empties_a_storage_in_use(self) -> None:
        class Emptying(toy.First):
            def forward(self, ctx: NodeContext, *inputs: Tensor) -> Tensor:
                output = super().forward(ctx, *inputs)
                inputs[0].untyped_storage().resize_(0)
                return output

        batches = [batch.detach().requires_grad_() for batch in toy.inputs(1)]
        chunk = toy.chunk_of(toy.toys(), pre_dispatch_computation=Emptying)
        with Runner(streams="recording") as runner, pytest.raises(StreamOrderError) as caught:
            runner.run(schedules.serial(chunk.shape, 1), chunk, batches)
        assert caught.value.rule == "released"

    def test_undeclared_state_on_the_same_stream(self) -> None:
        stash: dict[str, Tensor] = {}

        class Leaving(toy.First):
            def forward(self, ctx: NodeContext, *inputs: Tensor) -> Tensor:
                output = super().forward(ctx, *inputs)
                stash["wide"] = output.detach() * 2
                return output

        class Reading(toy.Middle):
            def forward(self, ctx: NodeContext, *inputs: Tensor) -> Tensor:
                return super().forward(ctx, inputs[0] + stash["wide"])

        chunk = toy.chunk_of(toy.toys(), pre_dispatch_computation=Leaving, mlp=Reading)
        with pytest.raises(StreamOrderError) as caught:
            _run(chunk, RecordingStreams(), schedules.serial(chunk.shape, 2))
        error = caught.value
        assert (error.rule, error.step, error.other) == (
            "undeclared",
            "F0.L0.mlp",
            "F0.L0.pre_dispatch_computation",
        )
        assert "declare" in str(error)

    def test_undeclared_state_across_streams(self) -> None:
        buffer = torch.zeros(6, 8, dtype=torch.float64)

        class Writing(toy.Middle):
            def forward(self, ctx: NodeContext, *inputs: Tensor) -> Tensor:
                buffer.copy_(inputs[0].detach())
                return super().forward(ctx, *inputs)

        class Reading(toy.Send):
            def forward(self, ctx: NodeContext, *inputs: Tensor) -> Tensor:
                return super().forward(ctx, inputs[0] + buffer)

        chunk = toy.chunk_of(toy.toys(1), moe_dispatch=Reading, mlp=Writing)
        with pytest.raises(StreamOrderError) as caught:
            _run(chunk, RecordingStreams(), schedules.forward_forward(chunk.shape, 2))
        assert caught.value.rule == "order"
        assert {caught.value.step, caught.value.other} == {"F1.L0.moe_dispatch", "F0.L0.mlp"}

    def test_a_storage_freed_while_the_other_stream_reads_it(self) -> None:
        """Without telling the allocator; with a handoff, which tells it, all is well."""
        keep: list[Tensor] = []

        class Keeping(toy.First):
            def forward(self, ctx: NodeContext, *inputs: Tensor) -> Tensor:
                output = super().forward(ctx, *inputs)
                keep.append(output.detach() * 2)
                return output

        class Dropping(toy.Send):
            def forward(self, ctx: NodeContext, *inputs: Tensor) -> Tensor:
                return super().forward(ctx, inputs[0] + keep.pop() * 0)

        chunk = toy.chunk_of(toy.toys(1), pre_dispatch_computation=Keeping, moe_dispatch=Dropping)
        with pytest.raises(StreamOrderError) as caught:
            _run(chunk, RecordingStreams())
        assert caught.value.rule in ("undeclared", "reuse")
        assert caught.value.step == "F0.L0.moe_dispatch"

    def test_a_declared_handoff_may_be_any_container(self) -> None:
        class Bag(dict[str, Any]):
            pass

        class Packing(toy.First):
            writes: ClassVar[HandoffMap] = {**toy.First.writes, "bag": Bag}

            def forward(self, ctx: NodeContext, *inputs: Tensor) -> Tensor:
                output = super().forward(ctx, *inputs)
                self.put(ctx, "bag", Bag(values=[output.detach() * 2]))
                return output

        class Unpacking(toy.Send):
            reads: ClassVar[HandoffMap] = {"bag": Bag}

            def forward(self, ctx: NodeContext, *inputs: Tensor) -> Tensor:
                bag = self.take(ctx, "bag")
                assert isinstance(bag, Bag)
                return super().forward(ctx, inputs[0] + bag["values"][0] * 0)

        _run(toy.chunk_of(toy.toys(), pre_dispatch_computation=Packing, moe_dispatch=Unpacking), RecordingStreams())


def test_values_are_those_of_the_inline_streams() -> None:
    """Outputs and gradients of toy layers, bit for bit."""
    layers, batches = toy.toys(), toy.inputs()
    chunk = toy.chunk_of(layers)
    outputs, input_grads, grads = toy.plain(layers, batches)
    with Runner(streams=RecordingStreams()) as runner:
        result = runner.run(schedules.forward_forward(chunk.shape, 3, group=3), chunk, batches)
    assert all(torch.equal(a, b) for a, b in zip(result.outputs, outputs, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(result.input_grads, input_grads, strict=True))  # type: ignore[arg-type]
    found = [p.grad for layer in layers for p in layer.parameters()]
    assert all(torch.equal(a, b) for a, b in zip(found, toy.summed(grads, [0, 1, 2]), strict=True))  # type: ignore[arg-type]


def test_slot_and_stream_are_told() -> None:
    """Each record names the stream of its step."""
    streams = RecordingStreams()
    _run(toy.chunk_of(toy.toys(1)), streams, count=1)
    by_step = {record.step: record.stream for record in streams.records}
    assert by_step["F0.L0.moe_combine"] is StreamType.COMM
    assert by_step["B0.L0.mlp"] is StreamType.COMPUTE
    assert issubclass(toy.Send, ScheduleNode)
    assert toy.Send.slot is Slot.MOE_DISPATCH
