"""Chunk runs that stay open between calls: pairs of chunks, forward-only runs, wrapped models, slots of one's own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.transformer.module import Float16Module
from torch import Tensor

import layernodes
from layernodes import (
    ChunkPlan,
    ExtraSlot,
    LayerPlan,
    NodeContext,
    NodeStateError,
    PairSchedule,
    Runner,
    Schedule,
    ScheduleError,
    ScheduleNode,
    Slot,
    StepError,
    StreamType,
    pairs,
    schedules,
)
from layernodes.state import HandoffMap
from tests.support import toy
from tests.support.compare import run_cell, snapshot
from tests.support.configs import Cell, by_name
from tests.support.fixtures import MEGATRON_WORLD, megatron_world  # noqa: F401
from tests.support.runs import Bench
from tests.support.slots import assert_equal_gradients

pytestmark = MEGATRON_WORLD
STREAMS = ["inline", "threads", "recording"]
_CELL = by_name("first-chunk-ep1")


def _cell(layers: str, **fields: Any) -> Cell:
    return replace(_CELL, layers=layers, num_microbatches=2, **fields)


def _through_pairs(forward: Bench, backward: Bench, make: Any, streams: str) -> list[str]:
    """Microbatch 0 of ``backward`` forward; then forward of ``forward`` against its backward; then the rest."""
    chunk_a, chunk_b = forward.chunk(), backward.chunk()
    a, b = forward.batches()[0], backward.batches()[0]
    forward.clear_grads()
    backward.clear_grads()
    with Runner(streams=streams) as runner:
        run_b = chunk_b.open(b)
        runner.run_pair(make(chunk_b.shape, None), run_b, None)
        run_a = chunk_a.open(a)
        result = runner.run_pair(make(chunk_a.shape, chunk_b.shape), run_a, run_b, loss_grad=backward.loss_grads()[0])
        assert result.timeline.intervals
        assert result.outputs[0] is run_a.output
        assert result.outputs[1] is None and result.input_grads[0] is None
        assert result.input_grads[1] is run_b.input_grad
        runner.run_pair(make(None, chunk_a.shape), None, run_a, loss_grad=forward.loss_grads()[0])
    found = []
    for bench, run in ((forward, run_a), (backward, run_b)):
        if not torch.equal(run.output, bench.plain.outputs[0]):
            found.append("output")
        expected = bench.plain.input_grads[0]
        if not (expected is run.input_grad or torch.equal(expected, run.input_grad)):  # type: ignore[arg-type]
            found.append("input_grad")
        for name, parameter in bench.model.named_parameters():
            grad = bench.plain.grads[0][name]
            if not (grad is parameter.grad or torch.equal(grad, parameter.grad)):  # type: ignore[arg-type]
                found.append(name)
    return found


class TestPairs:
    """Case 18, and everything that a pair may be made of."""

    @pytest.mark.parametrize("streams", STREAMS)
    @pytest.mark.parametrize("make", [pairs.serial, pairs.combined_1f1b, pairs.forward_forward])
    @pytest.mark.parametrize(
        ("forward", "backward"),
        [
            (_cell("MDM"), _cell("M", pre_process=False)),
            (_cell("D", pre_process=False), _cell("MMD")),
            (_cell("M", pre_process=False), _cell("M", pre_process=False, post_process=True)),
            (_cell("M", pre_process=False, post_process=True, mtp=1), _cell("DD")),
        ],
    )
    def test_chunks_of_different_length(self, forward: Cell, backward: Cell, make: Any, streams: str) -> None:
        a, b = Bench(forward), Bench(backward)
        assert _through_pairs(a, b, make, streams) == []

    @pytest.mark.parametrize("pre_process", [True, False])
    @pytest.mark.parametrize("post_process", [True, False])
    def test_a_chunk_without_decoder_layers(self, pre_process: bool, post_process: bool) -> None:
        a = Bench(_cell("MD"))
        b = Bench(_cell("D", pre_process=pre_process, post_process=post_process))
        b.model.decoder.layers = torch.nn.ModuleList()
        b.model.decoder.num_layers_per_pipeline_rank = 0
        b.plain = b._run_plain()
        assert b.chunk().shape.num_layers == 0
        for streams in STREAMS:
            assert _through_pairs(a, b, pairs.combined_1f1b, streams) == []

    def test_the_same_chunk_forward_and_backward(self) -> None:
        bench = Bench(_cell("MD"))
        chunk = bench.chunk()
        bench.clear_grads()
        batches, grads = bench.batches(), bench.loss_grads()
        with Runner(streams="threads") as runner:
            runs = [chunk.open(batch) for batch in batches]
            runner.run_pair(pairs.serial(chunk.shape, None), runs[0], None)
            runner.run_pair(pairs.combined_1f1b(chunk.shape, chunk.shape), runs[1], runs[0], grads[0])
            runner.run_pair(pairs.serial(None, chunk.shape), None, runs[1], grads[1])
        expected = bench.expected(schedules.serial(chunk.shape, 2))
        for name, parameter in bench.model.named_parameters():
            assert torch.equal(parameter.grad, expected[f"grad/{name}"]), name  # type: ignore[arg-type]

    def test_what_a_pair_refuses(self) -> None:
        chunk = toy.chunk_of(toy.toys(1))
        other = toy.chunk_of(toy.toys(2))
        (batch,) = toy.inputs(1)
        with Runner(streams="inline") as runner:
            with pytest.raises(ScheduleError):
                runner.run_pair(pairs.serial(other.shape, None), chunk.open(batch), None)
            with pytest.raises(ScheduleError):
                runner.run_pair(pairs.serial(chunk.shape, None), None, None)
            run = chunk.open(batch)
            with pytest.raises(layernodes.StepError) as caught:
                runner.run_pair(pairs.serial(None, chunk.shape), None, run)
            assert isinstance(caught.value.__cause__, NodeStateError)
            run = chunk.open(batch)
            runner.run_pair(pairs.serial(chunk.shape, None), run, None)
            with pytest.raises(layernodes.StepError) as caught:
                runner.run_pair(pairs.serial(chunk.shape, None), run, None)
            assert isinstance(caught.value.__cause__, NodeStateError)
            runner.run_pair(PairSchedule([]), None, None)
        with pytest.raises(NodeStateError, match="closed"):
            runner.run_pair(PairSchedule([]), None, None)


@pytest.mark.parametrize("streams", STREAMS)
@pytest.mark.parametrize("group", [1, 2, 3])
def test_forward_only(group: int, streams: str) -> None:
    """Outputs are the plain model's, no gradient appears, and no graph is recorded."""
    bench = Bench(by_name("alltoall-mtp-ep1"))
    shape = bench.chunk().shape
    state = bench.run(schedules.forward_only(shape, 3, group=group), streams=streams)
    for i, output in enumerate(bench.plain.outputs):
        assert torch.equal(state[f"output/{i}"], output)  # type: ignore[arg-type]
    assert all(state[name] is None for name in state if name.startswith("grad/"))


class TestWrappers:
    """A plan of a wrapped model is that of the model, and the wrapper's hooks fire once."""

    @pytest.mark.parametrize("streams", STREAMS)
    def test_float16(self, streams: str) -> None:
        """Keyword arguments are taken as they are, as the wrapper does: a loss mask's weights are not rounded."""
        bench = Bench(replace(by_name("mtp-bf16-ep1"), loss_mask=True))
        wrapped = Float16Module(bench.model.config, bench.model)
        for microbatch in bench.microbatches:
            microbatch.inputs["loss_mask"].mul_(torch.rand_like(microbatch.inputs["loss_mask"]))
        bench.reset()
        outputs = [wrapped(**microbatch.inputs) for microbatch in bench.microbatches]
        for output in outputs:
            output.backward(torch.ones_like(output))
        grads = {name: p.grad for name, p in bench.model.named_parameters()}
        bench.reset()
        chunk = ChunkPlan.build(wrapped)
        with Runner(streams=streams) as runner:
            result = runner.run(schedules.serial(chunk.shape, 3), chunk, bench.batches())
        for found, expected in zip(result.outputs, outputs, strict=True):
            assert found.dtype == expected.dtype == torch.float32
            assert torch.equal(found, expected)
        assert_equal_gradients(grads, {name: p.grad for name, p in bench.model.named_parameters()})

    @pytest.mark.parametrize("streams", ["inline", "threads"])
    def test_megatron_ddp(self, streams: str) -> None:
        grads: list[dict[str, Tensor]] = []
        for runs_plan in (False, True):
            bench = Bench(by_name("mtp-tied-ep1"))
            config = DistributedDataParallelConfig(overlap_grad_reduce=False, use_distributed_optimizer=False)
            wrapped = DistributedDataParallel(bench.model.config, config, bench.model)
            wrapped.zero_grad_buffer()
            bench.reset()
            if runs_plan:
                chunk = ChunkPlan.build(wrapped)
                with Runner(streams=streams) as runner:
                    schedule = schedules.combined_1f1b(chunk.shape, 3)
                    runner.run(schedule, chunk, bench.batches(), bench.loss_grads())
            else:
                for microbatch, grad in zip(bench.microbatches, bench.loss_grads(), strict=True):
                    wrapped(**microbatch.inputs).backward(grad)
            wrapped.finish_grad_sync()
            grads.append({name: p.main_grad.clone() for name, p in bench.model.named_parameters()})
        assert all(torch.equal(grads[0][name], grads[1][name]) for name in grads[0])
        assert any(grad.any() for grad in grads[0].values())


class _Widening(layernodes.ExpertNode):
    writes: ClassVar[HandoffMap] = {**layernodes.ExpertNode.writes, "wide": Tensor}

    def forward(self, ctx: NodeContext, *inputs: Tensor) -> Any:
        output = super().forward(ctx, *inputs)
        assert isinstance(output, Tensor)
        self.put(ctx, "wide", output * 0.5)
        return output


class _Joining(ScheduleNode):
    slot = ExtraSlot("joining", after=Slot.MLP)
    stream = StreamType.COMPUTE
    reads: ClassVar[HandoffMap] = {"wide": Tensor}

    def __init__(self, layer: Any) -> None:
        pass

    def forward(self, ctx: NodeContext, *inputs: Tensor) -> Tensor:
        wide = self.take(ctx, "wide")
        assert isinstance(wide, Tensor)
        return inputs[0] + wide


class _Scaling(ScheduleNode):
    slot = ExtraSlot("scaling", after=Slot.MLP, stream=StreamType.COMM)
    stream = StreamType.COMM

    def __init__(self, layer: Any) -> None:
        pass

    def forward(self, ctx: NodeContext, *inputs: Tensor) -> Tensor:
        return inputs[0] * 1.25

    def touches_rng(self) -> bool:
        return False


_SCALING: dict[Any, Any] = {_Scaling.slot: _Scaling}
_JOINING: dict[Any, Any] = {Slot.MLP: _Widening, _Joining.slot: _Joining}


@pytest.mark.parametrize("nodes", [_SCALING, _JOINING], ids=["scaling", "handoff"])
@pytest.mark.parametrize("split_combine", [False, True])
def test_an_extra_slot_is_the_same_in_both_ways(split_combine: bool, nodes: dict[Any, Any]) -> None:
    """A slot of the user's own, on MoE and dense layers: through Megatron-Core's plan and through the runner."""
    cell = replace(by_name("mixed-ep1"), num_microbatches=2)

    def build(layer: Any) -> LayerPlan:
        return LayerPlan.build(layer, nodes=nodes, split_combine=split_combine)

    def run_installed() -> Any:
        bench = Bench(cell)
        bench.reset()
        outputs = []
        with layernodes.install(build):
            for microbatch, grad in zip(bench.microbatches, bench.loss_grads(), strict=True):
                plan = bench.model.build_schedule_plan(**microbatch.inputs)
                output = type(plan).run(plan, None)
                outputs.append(output.detach().clone())
                type(plan).run(None, plan, b_grad=grad)
        return snapshot(bench.model, bench.microbatches, outputs, {})

    installed = run_installed()
    bench = Bench(cell)
    chunk = ChunkPlan.build(bench.model, nodes=nodes, split_combine=split_combine)
    name = next(slot.name for slot in nodes if isinstance(slot, ExtraSlot))
    assert all(name in layer.slot_names for layer in chunk.shape.layers)
    for streams in STREAMS:
        for schedule in (schedules.serial(chunk.shape, 2), schedules.combined_1f1b(chunk.shape, 2)):
            assert any(step.slot == name for step in schedule)
            state = bench.run(schedule, chunk=chunk, streams=streams)
            for key, value in state.items():
                if key.startswith(("output/", "grad/")):
                    assert torch.equal(value, installed[key]), (key, streams)  # type: ignore[arg-type]
    plain = Bench(cell).plain.outputs
    assert not torch.equal(plain[0], installed["output/0"])  # type: ignore[arg-type]


def test_split_combine_through_install() -> None:
    """The sixth slot is fused into its predecessor there, and the bits are the plain model's."""
    cell = by_name("latent-shared-ep1")
    verdict = run_cell(cell, lambda: layernodes.install(lambda layer: LayerPlan.build(layer, split_combine=True)))
    assert verdict.status == "right", verdict


def test_a_run_is_used_once() -> None:
    """A chunk run that has gone forward refuses to do so again; closed, it holds its results only."""
    chunk = toy.chunk_of(toy.toys(1))
    run = chunk.open(toy.inputs(1)[0])
    for index in range(4):
        run.forward(index)
    with pytest.raises(NodeStateError, match="second time"):
        run.forward(0)
    with pytest.raises(NodeStateError, match="before its F"):
        run.backward(3)
    run.end_forward()
    run.close()
    assert run.output is not None
    with pytest.raises(NodeStateError):
        run.forward(0)


def test_schedules_of_a_chunk_may_name_pass_throughs() -> None:
    """One schedule serves dense and MoE layers alike."""
    moe, dense = Bench(by_name("alltoall-moe-ep1")), Bench(by_name("dense"))
    schedule = schedules.combined_1f1b(moe.chunk().shape, 3)
    assert isinstance(schedule, Schedule)
    for streams in STREAMS:
        assert moe.check(schedule, streams=streams) == []
        assert dense.check(schedule, streams=streams) == []


def test_complex_outputs_go_backward_too() -> None:
    """Without ``loss_grads`` their gradient is one, as any output's; none at all left the parameters without."""

    class Rotation(ScheduleNode):
        slot = Slot.MLP
        stream = StreamType.COMPUTE

        def __init__(self, layer: torch.nn.ParameterList) -> None:
            self.layer = layer

        def forward(self, ctx: NodeContext, *inputs: Tensor) -> Tensor:
            return inputs[0] * self.layer[0]

    phases = torch.nn.Parameter(torch.randn(4, dtype=torch.complex128))
    x = torch.randn(2, 4, dtype=torch.complex128)
    chunk = ChunkPlan.of([LayerPlan.build(torch.nn.ParameterList([phases]), nodes={Slot.MLP: Rotation})])
    with Runner("inline") as runner:
        runner.run(schedules.serial(chunk.shape, 1), chunk, [x])
    output = x * phases
    (expected,) = torch.autograd.grad(output, phases, torch.ones_like(output))
    assert phases.grad is not None and torch.equal(phases.grad, expected)


@pytest.mark.parametrize("shape", [(2, 6, 8), (8,), (1, 8), ()])
def test_a_gradient_of_another_shape_is_refused(shape: tuple[int, ...]) -> None:
    """As plain autograd refuses it, also where it could be broadcast, or summed, to the output's shape."""
    chunk = toy.chunk_of(toy.toys(1))
    gradient = torch.ones(shape, dtype=torch.float64)
    with Runner("inline") as runner, pytest.raises(StepError) as caught:
        runner.run(schedules.serial(chunk.shape, 1), chunk, toy.inputs(1), [gradient])
    assert isinstance(caught.value.__cause__, NodeStateError)
    assert f"a tensor of shape (6, 8), and the gradient given for it has shape {shape}" in str(caught.value)
