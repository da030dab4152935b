"""The runner on small inputs with known answers, and what it refuses."""

from __future__ import annotations

import gc
import itertools
import threading
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Linear, Module

from layernodes import (
    ArgumentError,
    BatchError,
    ChunkPlan,
    ChunkShape,
    LayerPlan,
    NodeContext,
    NodeStateError,
    OptionError,
    Phase,
    Runner,
    Schedule,
    ScheduleError,
    ScheduleNode,
    Slot,
    Step,
    StreamType,
    schedules,
    validate,
    validate_pair,
)
from tests.support import toy

STREAMS = ["inline", "threads", "recording"]


class _Sine(ScheduleNode):
    slot = Slot.MLP
    stream = StreamType.COMPUTE

    def __init__(self, layer: Module) -> None:
        pass

    def forward(self, ctx: NodeContext, *inputs: Tensor) -> Tensor:
        return torch.sin(inputs[0])


def _chunk(node: Any, slot: Slot = Slot.MLP, layer: Module | None = None) -> ChunkPlan:
    return ChunkPlan.of([LayerPlan.build(layer or Module(), nodes={slot: node})])


def _leaf(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64, requires_grad=True)


def _schedule(order: str) -> Schedule:
    """``F0B0F1B1`` over the one slot of a one-layer chunk."""
    pairs = [order[i : i + 2] for i in range(0, len(order), 2)]
    return Schedule.parse(" ".join(f"{pair}.L0.mlp" for pair in pairs))


class TestOneNodeSeveralMicrobatches:
    """Case 2."""

    @pytest.mark.parametrize("streams", STREAMS)
    def test_two(self, streams: str) -> None:
        with Runner(streams=streams) as runner:
            result = runner.run(_schedule("F0F1B0B1"), _chunk(_Sine), [_leaf(0.1), _leaf(1.2)])
        grads = [float(g.item()) for g in result.input_grads if g is not None]
        assert grads == pytest.approx([0.995004165, 0.362357754], abs=1e-9)

    @pytest.mark.parametrize("streams", STREAMS)
    def test_every_interleaving_of_three(self, streams: str) -> None:
        chunk = _chunk(_Sine)
        values = (0.1, 1.2, -0.7)
        expected = [torch.cos(torch.tensor([v], dtype=torch.float64)) for v in values]
        steps = [f"{phase}{m}" for m in range(3) for phase in "FB"]
        orders = [
            "".join(order)
            for order in itertools.permutations(steps)
            if all(order.index(f"F{m}") < order.index(f"B{m}") for m in range(3))
        ]
        assert len(orders) == 90
        with Runner(streams=streams) as runner:
            for order in orders:
                result = runner.run(_schedule(order), chunk, [_leaf(v) for v in values])
                assert all(torch.equal(a, b) for a, b in zip(result.input_grads, expected, strict=True))  # type: ignore[arg-type]


@pytest.mark.parametrize("streams", STREAMS)
@pytest.mark.parametrize("requires_grad", [True, False])
def test_a_reused_input_buffer(streams: str, requires_grad: bool) -> None:
    """Hooks on the node's input fire once a step, though the caller hands the same buffer (case 3)."""
    buffer = torch.zeros(2, 3, dtype=torch.float64, requires_grad=requires_grad)
    calls: list[int] = []

    class Hooked(_Sine):
        def __init__(self, layer: Module) -> None:
            self.weight = torch.ones(3, dtype=torch.float64, requires_grad=True)

        def forward(self, ctx: NodeContext, *inputs: Tensor) -> Tensor:
            if inputs[0].requires_grad:
                inputs[0].register_hook(lambda g: calls.append(1))
            return torch.sin(inputs[0]) * self.weight

        def frees_input(self) -> bool:
            return True

    chunk = _chunk(Hooked)
    per_step = []
    with Runner(streams=streams) as runner:
        for step in range(5):
            with torch.no_grad():
                buffer.fill_(step * 0.1)
            result = runner.run(_schedule("F0B0"), chunk, [buffer])
            per_step.append(len(calls))
            calls.clear()
            assert torch.equal(result.outputs[0], torch.sin(buffer.detach()))
            if requires_grad:
                assert torch.equal(result.input_grads[0], torch.cos(buffer.detach()))  # type: ignore[arg-type]
    assert per_step == ([1] * 5 if requires_grad else [0] * 5)
    assert buffer.untyped_storage().nbytes() == 48
    assert buffer.grad is None


@pytest.mark.parametrize("streams", STREAMS)
def test_an_unused_and_an_integer_output(streams: str) -> None:
    """They take no part in backward (case 4)."""

    class Splitting(_Sine):
        slot = Slot.PRE_DISPATCH_COMPUTATION

        def forward(self, ctx: NodeContext, *inputs: Tensor) -> Any:
            return inputs[0] * 3, torch.tensor([1, 0]), inputs[0] * 5

    class Using(_Sine):
        def forward(self, ctx: NodeContext, *inputs: Tensor) -> Tensor:
            assert inputs[1].dtype == torch.int64
            return inputs[0] * 2

    chunk = ChunkPlan.of([LayerPlan.build(Module(), nodes={Slot.PRE_DISPATCH_COMPUTATION: Splitting, Slot.MLP: Using})])
    with Runner(streams=streams) as runner:
        result = runner.run(schedules.serial(chunk.shape, 2), chunk, [_leaf(1.0, 2.0), _leaf(3.0, 4.0)])
        alone = _chunk(Splitting, Slot.PRE_DISPATCH_COMPUTATION)
        several = runner.run(schedules.serial(alone.shape, 1), alone, [_leaf(1.0, 2.0)])
    assert [g.tolist() for g in result.input_grads if g is not None] == [[6.0, 6.0], [6.0, 6.0]]
    assert len(several.outputs[0]) == 3
    assert several.input_grads[0] is not None
    assert several.input_grads[0].tolist() == [8.0, 8.0]


@pytest.mark.parametrize("streams", STREAMS)
def test_dispatcher_state_belongs_to_a_microbatch(streams: str) -> None:
    """Two dispatches, then two combines, over one node: each gets its own rows back (case 5)."""
    ids = {0: torch.tensor([1, 0, 1, 0]), 1: torch.tensor([0, 0, 1, 1])}

    class Sorting(ScheduleNode):
        slot = Slot.MOE_DISPATCH
        stream = StreamType.COMM
        writes = {"order": Tensor}  # noqa: RUF012

        def __init__(self, layer: Module) -> None:
            pass

        def forward(self, ctx: NodeContext, *inputs: Tensor) -> Tensor:
            order = torch.argsort(ids[ctx.chunk_state.microbatch], stable=True)  # type: ignore[attr-defined]
            self.put(ctx, "order", order)
            return inputs[0][order]

    class Unsorting(ScheduleNode):
        slot = Slot.MOE_COMBINE
        stream = StreamType.COMM
        reads = {"order": Tensor}  # noqa: RUF012

        def __init__(self, layer: Module) -> None:
            pass

        def forward(self, ctx: NodeContext, *inputs: Tensor) -> Tensor:
            order = self.take(ctx, "order")
            assert isinstance(order, Tensor)
            return torch.zeros_like(inputs[0]).index_add(0, order, inputs[0])

    layer = LayerPlan.build(Module(), nodes={Slot.MOE_DISPATCH: Sorting, Slot.MOE_COMBINE: Unsorting})
    chunk = ChunkPlan.of([layer])
    rows = torch.arange(8, dtype=torch.float64).view(4, 2)
    with Runner(streams=streams) as runner:
        result = runner.run(
            schedules.forward_only(chunk.shape, 2, group=2),
            chunk,
            [(rows, {"microbatch": 0}), (rows, {"microbatch": 1})],
        )
    assert [out[:, 0].tolist() for out in result.outputs] == [[0, 2, 4, 6], [0, 2, 4, 6]]


class _Dropping(_Sine):
    def forward(self, ctx: NodeContext, *inputs: Tensor) -> Tensor:
        return torch.dropout(inputs[0], 0.5, True)


class TestDropout:
    """Case 6, on a tiny layer; Megatron models are in the property tests."""

    def _run(self, order: str, rng: str, streams: str) -> tuple[tuple[Any, ...], Tensor]:
        torch.manual_seed(11)
        with Runner(streams=streams, rng=rng) as runner:
            result = runner.run(_schedule(order), _chunk(_Dropping), [torch.ones(64).requires_grad_() for _ in "01"])
        return (*result.outputs, *result.input_grads), torch.get_rng_state()

    @pytest.mark.parametrize("streams", STREAMS)
    def test_plain(self, streams: str) -> None:
        torch.manual_seed(11)
        expected = [torch.dropout(torch.ones(64), 0.5, True) for _ in "01"]
        state = torch.get_rng_state()
        for order in ("F0B0F1B1", "F0F1B1B0"):
            found, after = self._run(order, "plain", streams)
            assert all(torch.equal(a, b) for a, b in zip(found, [*expected, *expected], strict=True))
            assert torch.equal(after, state)

    @pytest.mark.parametrize("streams", STREAMS)
    def test_per_step(self, streams: str) -> None:
        expected, state = self._run("F0B0F1B1", "per_step", "inline")
        assert not torch.equal(expected[0], expected[1])
        for order in ("F0F1B1B0", "F1F0B0B1", "F1B1F0B0"):
            found, after = self._run(order, "per_step", streams)
            assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
            assert torch.equal(after, state)
        assert not torch.equal(state, torch.Generator().manual_seed(11).get_state())


class TestRefused:
    """Before anything runs (case 13), and says what to change."""

    @pytest.mark.parametrize(
        ("text", "rule"),
        [
            ("W0.L0.mlp F0.L0.mlp B0.L0.mlp", "unexpected"),
            ("B0.L0.mlp F0.L0.mlp", "order"),
            ("F0.L0.mlp B0.L0.mlp F0.L7.mlp", "foreign"),
            ("F0.L0.mlp F0.L0.mlp B0.L0.mlp", "duplicate"),
            ("F0.L0.mlp", "missing"),
            ("F0.L0.mlp B0.L0.mlpx B0.L0.mlp", "unknown_slot"),
        ],
    )
    def test_malformed_schedules(self, text: str, rule: str) -> None:
        ran: list[Step] = []
        with Runner(streams="inline", before_step=ran.append) as runner:
            count = 2 if rule == "missing" else 1
            with pytest.raises(ScheduleError) as caught:
                runner.run(Schedule.parse(text), _chunk(_Sine), [_leaf(1.0)] * count)
        assert rule in {violation.rule for violation in caught.value.violations}
        assert not ran

    def test_an_unknown_slot(self) -> None:
        """The slots that the layer has, and the closest one (case 16)."""
        text = "F0.L0.post_attn F0.L0.mlp B0.L0.mlp"
        with Runner(streams="inline") as runner, pytest.raises(ScheduleError) as caught:
            runner.run(Schedule.parse(text), _chunk(_Sine), [_leaf(1.0)])
        assert "post_attn" in str(caught.value)
        assert "pre_dispatch_computation" in str(caught.value)

    def test_a_schedule_for_another_chunk(self) -> None:
        other = schedules.serial(ChunkShape.of(["moe", "moe"]), 1)
        with Runner(streams="inline") as runner, pytest.raises(ScheduleError, match="pre_process"):
            runner.run(other, _chunk(_Sine), [_leaf(1.0)])

    @pytest.mark.parametrize(
        ("batch", "found"),
        [
            *((None, "NoneType"), ("text", "str"), ({"input_ids": 1}, "dict"), ([1.0], "list"), ((), r"\(\)")),
            ((_leaf(1.0),), r"\(Tensor\)"),
            ((_leaf(1.0), 3), r"\(Tensor, int\)"),
            ((_leaf(1.0), {}, {}), r"\(Tensor, dict, dict\)"),
        ],
    )
    def test_bad_batches(self, batch: Any, found: str) -> None:
        with Runner(streams="inline") as runner, pytest.raises(BatchError, match=rf"is a tensor, or .* found {found}$"):
            runner.run(_schedule("F0B0"), _chunk(_Sine), [batch])

    def test_loss_grads(self) -> None:
        with Runner(streams="inline") as runner:
            with pytest.raises(ScheduleError, match="2 loss_grads for 1 batches"):
                runner.run(_schedule("F0B0"), _chunk(_Sine), [_leaf(1.0)], [None, None])
            result = runner.run(_schedule("F0B0"), _chunk(_Sine), [_leaf(0.0)], [torch.full((1,), 3.0).double()])
        assert result.input_grads[0] is not None
        assert result.input_grads[0].item() == 3.0

    def test_another_number_of_batches(self) -> None:
        """Beside the steps at fault, the cause is told."""
        with Runner(streams="inline") as runner, pytest.raises(ScheduleError, match="F1.L0.mlp") as caught:
            runner.run(_schedule("F0B0F1B1"), _chunk(_Sine), [_leaf(1.0)])
        assert caught.value.__notes__ == [
            "the run has 1 batches, and the schedule 2 microbatches; give one batch for each"
        ]

    def test_a_result_prints_shortly(self) -> None:
        with Runner(streams="inline") as runner:
            assert "Program" not in repr(runner.run(_schedule("F0B0"), _chunk(_Sine), [_leaf(1.0)]))

    @pytest.mark.parametrize("schedule", ["F0.L0.mlp B0.L0.mlp", [Step(Phase.F, 0, 0, "mlp")], None])
    def test_what_is_no_schedule(self, schedule: Any) -> None:
        """A text or a list of steps is told how to become one, wherever a schedule is taken."""
        chunk = _chunk(_Sine)
        with Runner(streams="inline") as runner:
            for take in (
                lambda: runner.run(schedule, chunk, [_leaf(1.0)]),
                lambda: runner.run_pair(schedule, chunk.open(_leaf(1.0)), None),
                lambda: validate(schedule, chunk.shape),
                lambda: validate_pair(schedule, chunk.shape, None),
            ):
                with pytest.raises(ArgumentError, match=r"Schedule is wanted; .*Schedule\(steps\).*Schedule.parse"):
                    take()

    def test_a_closed_runner(self) -> None:
        runner = Runner(streams="inline")
        runner.close()
        runner.close()
        with pytest.raises(NodeStateError, match="closed"):
            runner.run(_schedule("F0B0"), _chunk(_Sine), [_leaf(1.0)])

    @pytest.mark.parametrize("options", [{"streams": "warp"}, {"streams": "inline", "rng": "dice"}])
    def test_unknown_options(self, options: Any) -> None:
        with pytest.raises(OptionError, match="choose one of"):
            Runner(**options)

    def test_cuda_without_an_accelerator(self) -> None:
        if torch.accelerator.is_available():
            pytest.skip("there is one")
        with pytest.raises(NodeStateError, match="use 'threads' or 'inline'"):
            Runner(streams="cuda")


@pytest.mark.parametrize("streams", ["inline", "threads"])
def test_callbacks_ranges_and_timeline(streams: str) -> None:
    """Around every step: callbacks on its thread, a profiler range of its name; intervals in order on each stream."""
    layers = toy.toys()
    chunk = toy.chunk_of(layers)
    schedule = schedules.combined_1f1b(chunk.shape, 3)
    before: list[tuple[str, int]] = []
    after: list[tuple[str, int]] = []
    config = torch.profiler._ExperimentalConfig(profile_all_threads=True)
    with (
        Runner(
            streams=streams,
            before_step=lambda step: before.append((str(step), threading.get_ident())),
            after_step=lambda step: after.append((str(step), threading.get_ident())),
        ) as runner,
        torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], experimental_config=config) as prof,
    ):
        result = runner.run(schedule, chunk, toy.inputs())
    texts = [str(step) for step in schedule]
    assert sorted(text for text, _ in before) == sorted(texts)
    assert sorted(before) == sorted(after)
    ranges = {event.name for event in prof.events()}  # type: ignore[union-attr]
    assert set(texts) <= ranges
    timeline = result.timeline
    assert [interval.step for interval in timeline.intervals] == list(schedule)
    assert timeline.rules is not None
    assert timeline.rules.shapes[Phase.F] == chunk.shape
    for stream in StreamType:
        own = [i for i in timeline.intervals if i.stream is stream]
        assert own
        assert all(i.start <= i.end for i in own)
        assert all(a.end <= b.start + 1e-9 for a, b in itertools.pairwise(own))
    assert timeline.makespan > 0
    ends = {i.step: i.end for i in timeline.intervals}
    starts = {i.step: i.start for i in timeline.intervals}
    for first, second in itertools.pairwise(s for s in schedule if (s.phase, s.microbatch) == (Phase.F, 1)):
        assert ends[first] <= starts[second] + 1e-9


def test_communication_runs_beside_computation() -> None:
    """On thread streams, steps of the two lanes overlap in time."""
    layers = toy.toys()
    for layer in layers:
        layer.fuse.seconds = 0.01
    chunk = toy.chunk_of(layers)
    with Runner(streams="threads") as runner:
        result = runner.run(schedules.forward_forward(chunk.shape, 2), chunk, toy.inputs(2))
    lanes = [[i for i in result.timeline.intervals if i.stream is stream] for stream in StreamType]
    beside = sum(max(0.0, min(a.end, b.end) - max(a.start, b.start)) for a in lanes[0] for b in lanes[1])
    assert beside > 0.02


@pytest.mark.parametrize("streams", STREAMS)
def test_results_hold_no_graph(streams: str) -> None:
    """Neither outputs nor input gradients, with and without a backward."""
    chunk = toy.chunk_of(toy.toys())
    with Runner(streams=streams) as runner:
        trained = runner.run(schedules.serial(chunk.shape, 2), chunk, toy.inputs(2))
        forward = runner.run(schedules.forward_only(chunk.shape, 2), chunk, toy.inputs(2))
    for tensor in (*trained.outputs, *trained.input_grads, *forward.outputs):
        assert tensor is not None
        assert tensor.grad_fn is None
        assert not tensor.requires_grad
    assert forward.input_grads == (None, None)
    assert all(torch.equal(a, b) for a, b in zip(trained.outputs, forward.outputs, strict=True))


@pytest.mark.parametrize("streams", STREAMS)
def test_layers_that_share_a_module(streams: str) -> None:
    """Its gradient is summed within a microbatch, delivered once, hooks and all; lanes that share it wait."""
    torch.manual_seed(5)
    shared = Linear(8, 8, dtype=torch.float64)
    layers = toy.toys(shared=shared)

    class OnComm(toy.Send):
        def __init__(self, layer: toy.Toy) -> None:
            super().__init__(layer)
            self.linear = layer.first

        def forward(self, ctx: NodeContext, *inputs: Tensor) -> Tensor:
            return super().forward(ctx, inputs[0] + self.linear.weight.sum() * 0.25)

    chunk = toy.chunk_of(layers, moe_dispatch=OnComm)
    batches = toy.inputs()
    alone: list[list[Tensor]] = []
    fired: list[int] = []
    parameters = list(dict.fromkeys(p for layer in layers for p in layer.parameters()))
    shared.weight.register_post_accumulate_grad_hook(lambda p: fired.append(1))
    with Runner(streams="inline") as runner:
        for batch in batches:
            for parameter in parameters:
                parameter.grad = None
            runner.run(schedules.serial(chunk.shape, 1), chunk, [batch])
            alone.append([p.grad.clone() for p in parameters if p.grad is not None])
    assert len(fired) == 3
    expected = torch.autograd.grad(_with_comm(layers, batches[0]).sum(), shared.weight)[0]
    torch.testing.assert_close(alone[0][parameters.index(shared.weight)], expected)
    for order, schedule in (([0, 1, 2], schedules.combined_1f1b(chunk.shape, 3)), ([0, 1, 2], None)):
        for parameter in parameters:
            parameter.grad = None
        fired.clear()
        with Runner(streams=streams) as runner:
            runner.run(schedule or schedules.forward_forward(chunk.shape, 3, group=3), chunk, batches)
        assert len(fired) == 3
        assert all(torch.equal(p.grad, g) for p, g in zip(parameters, toy.summed(alone, order), strict=True))  # type: ignore[arg-type]
    gc.collect()


def test_lanes_that_share_a_module_take_turns() -> None:
    """While one lane's step holds a stand-in in a module, no step of the other lane that uses the module runs."""
    layers = toy.toys(shared=Linear(8, 8, dtype=torch.float64))

    class OnComm(toy.Send):
        def __init__(self, layer: toy.Toy) -> None:
            super().__init__(layer)
            self.linear = layer.first

        def forward(self, ctx: NodeContext, *inputs: Tensor) -> Tensor:
            return super().forward(ctx, inputs[0] + self.linear.weight.sum() * 0.25)

    chunk = toy.chunk_of(layers, moe_dispatch=OnComm)
    for layer in layers:
        layer.fuse.seconds = 0.01
    with Runner(streams="threads") as runner:
        result = runner.run(schedules.forward_forward(chunk.shape, 3, group=3), chunk, toy.inputs())
    sharing = [i for i in result.timeline.intervals if i.step.slot in ("pre_dispatch_computation", "moe_dispatch")]
    assert len({interval.stream for interval in sharing}) == 2
    sharing.sort(key=lambda interval: interval.start)
    assert all(a.end <= b.start + 1e-9 for a, b in itertools.pairwise(sharing))


def _with_comm(layers: Sequence[toy.Toy], value: Tensor) -> Tensor:
    for layer in layers:
        wide = torch.tanh(layer.first(value))
        value = torch.sin(layer.second((wide * 0.5 + layer.first.weight.sum() * 0.25) * 2.0)) * 1.5 + wide
    return value
