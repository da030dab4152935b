"""Which neighbouring layers are one logical layer, and what that looks like."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch
from megatron.core.ssm.mamba_layer import MambaLayer
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor
from torch.nn import Linear

from layernodes import (
    AttentionNode,
    ChunkPlan,
    ExtraSlot,
    LayerPlan,
    LayerRegistry,
    MixerNode,
    MTPPostNode,
    NodeContext,
    PlanError,
    ScheduleNode,
    Slot,
    StreamType,
    UnsupportedLayerError,
    schedules,
)
from layernodes.state import HandoffMap
from tests.support.build import make_model
from tests.support.configs import Cell, by_name
from tests.support.fixtures import MEGATRON_WORLD, megatron_world  # noqa: F401
from tests.support.hybrid_cells import hybrid_cell
from tests.support.runs import Bench
from tests.support.slots import SlotRun

pytestmark = MEGATRON_WORLD


def _kinds(pattern: str, **options: Any) -> list[str]:
    chunk = ChunkPlan.build(make_model(hybrid_cell(pattern)), **options)
    return [layer.kind for layer in chunk.shape.layers]


@pytest.mark.parametrize(
    "pattern, expected",
    [
        ("*E", ["*E"]),
        ("*E*E", ["*E", "*E"]),
        ("MM*E", ["MM*E"]),
        ("M-M-*E", ["M-", "M-", "*E"]),
        ("*EE-", ["*E", "E", "-"]),
        ("E*M", ["E", "*M"]),
        ("G", ["G"]),
    ],
)
def test_by_default_and_where_asked_for(pattern: str, expected: list[str]) -> None:
    """A logical layer ends with its MoE or MLP layer."""
    assert _kinds(pattern) == expected
    assert _kinds(pattern, group=True) == expected
    assert _kinds(pattern, group=False) == list(pattern)


def test_shape_and_description_tell() -> None:
    """The kind is the pattern's; the slots are those of the MoE layer; the description names every layer."""
    chunk = ChunkPlan.build(make_model(hybrid_cell("M*E-")))
    first, second = chunk.shape.layers
    assert first.passthrough == {"mtp_post_process"}
    assert second.passthrough == {"pre_dispatch_computation", "moe_dispatch", "moe_combine", "mtp_post_process"}
    assert str(chunk.shape) == "pre_process | L0 M*E | L1 - | post_process"
    description = chunk.layers[0].describe()
    assert description.layer == "MambaLayer + TransformerLayer + MoETransformerLayer"
    assert [node.node for node in description.nodes] == [
        "GroupedPreDispatchNode",
        "DispatchNode",
        "ExpertNode",
        "CombineNode",
    ]
    assert description.nodes[0].writes.keys() == {"residual", "shared_expert_output", "pass_to_dispatch"}
    assert repr(chunk.layers[0]).startswith("LayerPlan(MambaLayer + TransformerLayer + MoETransformerLayer: pre_disp")


def test_notes_of_each_layer_are_told_once() -> None:
    """What is done otherwise than in the plain layers."""
    config = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    (plan,) = ChunkPlan.build(make_model(hybrid_cell("*E", config=config))).layers
    (note,) = plan.describe().notes
    assert note.startswith("full recompute is not done")
    assert str(plan.describe()).endswith(f"note: {note}")


def test_offloading_to_the_host_is_not_done() -> None:
    """Said, since a run with it needs more memory than it was meant to."""
    model = make_model(by_name("alltoall-moe-ep1"))
    model.config.cpu_offloading = True
    (note,) = LayerPlan.build(model.decoder.layers[0]).describe().notes
    assert note == "cpu_offloading is not done: what a slot's backward needs stays on the device"


def test_mtp_stack_is_one_logical_layer() -> None:
    """Whatever ``group`` says: the layers behind the MoE layer run in its last slot."""
    cell = hybrid_cell("*", mtp=1, mtp_pattern="M*E-")
    for group in (False, True):
        chunk = ChunkPlan.build(make_model(cell), group=group)
        assert [(layer.kind, layer.mtp) for layer in chunk.shape.layers] == [("*", False), ("M*E-", True)]
    description = chunk.layers[1].describe()
    layers = "MambaLayer + TransformerLayer + MoETransformerLayer + MLPLayer"
    assert description.layer == f"MultiTokenPredictionLayer({layers})"
    assert [node.node for node in description.nodes] == [
        "StackPreDispatchNode",
        "DispatchNode",
        "ExpertNode",
        "CombineNode",
        "StackPostNode",
    ]
    post = [name.rpartition(".")[0] for name in description.nodes[-1].with_backward]
    assert "final_layernorm" in post
    assert any(name.startswith("mtp_model_layer.layers.3") for name in post)


@pytest.mark.parametrize(
    "pattern, group, wanted",
    [
        ("*E", "E*", r"group='E\*' is not this chunk's layer pattern '\*E' .* for example '\*E'"),
        ("M-*E", "M-*", r"is not this chunk's layer pattern 'M-\*E' .* for example 'M- \*E'"),
        ("E*", "E*", "cannot join MoETransformerLayer TransformerLayer as one logical layer"),
        ("EE", "EE", "it may have one layer with several slots, as its last; group them otherwise"),
    ],
)
def test_groupings_that_do_not_fit(pattern: str, group: str, wanted: str) -> None:
    """Refused when the plan is built, in words."""
    with pytest.raises(PlanError, match=wanted):
        _kinds(pattern, group=group)


def test_a_gpt_model_has_whole_layers() -> None:
    """Grouping them is refused, leaving them is not."""
    model = make_model(Cell(name="gpt"))
    assert len(ChunkPlan.build(model, group=False).layers) == 2
    with pytest.raises(PlanError, match="group=True joins layers of a HybridModel"):
        ChunkPlan.build(model, group=True)


def test_two_moe_layers_in_one_mtp_stack_are_refused() -> None:
    """One logical layer has one dispatch."""
    with pytest.raises(UnsupportedLayerError, match="with 2 MoE layers in its stack") as raised:
        ChunkPlan.build(make_model(hybrid_cell("*", mtp=1, mtp_pattern="EE")))
    assert (raised.value.field, raised.value.value) == ("mtp_layer_pattern", "EE")


@pytest.mark.parametrize("slot, wanted", [(Slot.MTP_POST_PROCESS, "Slot.MTP_POST_PROCESS"), ("mlpx", "the key 'mlpx'")])
def test_nodes_that_no_layer_of_an_mtp_stack_has_are_refused(slot: Any, wanted: str) -> None:
    """They were built into nothing, without a word."""
    layer = make_model(hybrid_cell("*", mtp=1)).mtp.layers[0]
    with pytest.raises(PlanError, match=wanted):
        LayerPlan.build(layer, nodes={slot: MTPPostNode})


def test_first_and_last_is_one_layer_of_a_group() -> None:
    """What a user's node is told of its layer is what it would be told outside a group."""
    told: dict[str, tuple[bool, bool]] = {}

    class Attention(AttentionNode):
        def forward(self, ctx: NodeContext, *inputs: Any) -> Any:
            told["*"] = ctx.is_first_layer, ctx.is_last_layer
            return super().forward(ctx, *inputs)

    class Mixer(MixerNode):
        def forward(self, ctx: NodeContext, *inputs: Any) -> Any:
            told["M"] = ctx.is_first_layer, ctx.is_last_layer
            return super().forward(ctx, *inputs)

    bench = Bench(hybrid_cell("M*"))
    pre = Slot.PRE_DISPATCH_COMPUTATION
    registry = LayerRegistry().register(TransformerLayer, {pre: Attention}).register(MambaLayer, {pre: Mixer})
    chunk = ChunkPlan.build(bench.model, registry=registry)
    assert len(chunk.layers) == 1
    bench.run(schedules.serial(chunk.shape, 3), chunk=chunk)
    assert told == {"M": (True, False), "*": (False, True)}


@pytest.mark.parametrize("config, wanted", [({}, False), ({"attention_dropout": 0.1}, True)])
def test_a_group_draws_where_one_of_its_layers_does(config: dict[str, float], wanted: bool) -> None:
    """Steps that draw random numbers run in the schedule's order; others need not."""
    node = ChunkPlan.build(make_model(hybrid_cell("*E", config=config))).layers[0].nodes[Slot.PRE_DISPATCH_COMPUTATION]
    assert node.touches_rng() is wanted


def test_joining_plans() -> None:
    """``LayerPlan.join`` of one plan is that plan, of none an error; a plan with an extra slot ends a group."""
    model: Any = make_model(hybrid_cell("*E"))
    plans = [LayerPlan.build(layer) for layer in model.decoder.layers]
    assert LayerPlan.join(plans[:1]) is plans[0]
    with pytest.raises(PlanError, match="no layer plans to join"):
        LayerPlan.join([])

    class Probe(ScheduleNode):
        slot = ExtraSlot("probe", after=Slot.PRE_DISPATCH_COMPUTATION)
        stream = StreamType.COMPUTE

        def forward(self, ctx: Any, *inputs: Any) -> Any:
            return inputs if len(inputs) > 1 else inputs[0]

    assert _kinds("*E", nodes={Probe.slot: lambda _: Probe()}) == ["*", "E"]
    joined = LayerPlan.join(plans)
    assert [list(part.nodes) for part in joined.parts] == [list(plan.nodes) for plan in plans]
    assert ChunkPlan.of([joined], wgrad="auto").layers[0].nodes[Slot.MLP].wgrad_parameters
    assert ChunkPlan.of([joined], wgrad="auto").layers[0].nodes[Slot.PRE_DISPATCH_COMPUTATION].wgrad_parameters


def test_a_handoff_into_a_fused_slot_keeps_its_gradient() -> None:
    """The joined layers' first callable also runs an extra slot that reads what one of the layers wrote."""
    layers = [Linear(4, 4, dtype=torch.float64) for _ in range(2)]

    class Plain(ScheduleNode):
        slot = Slot.PRE_DISPATCH_COMPUTATION
        stream = StreamType.COMPUTE

        def __init__(self, layer: Linear) -> None:
            self.layer = layer

        def forward(self, ctx: NodeContext, *inputs: Tensor) -> Tensor:
            return torch.tanh(self.layer(inputs[0]))

    class Writing(Plain):
        writes: ClassVar[HandoffMap] = {"gate": Tensor}

        def forward(self, ctx: NodeContext, *inputs: Tensor) -> Tensor:
            output = super().forward(ctx, *inputs)
            self.put(ctx, "gate", output * 3)
            return output

    class Reading(ScheduleNode):
        slot = ExtraSlot("gated", after=Slot.PRE_DISPATCH_COMPUTATION)
        stream = StreamType.COMPUTE
        reads: ClassVar[HandoffMap] = {"gate": Tensor}

        def forward(self, ctx: NodeContext, *inputs: Tensor) -> Tensor:
            gate = self.take(ctx, "gate")
            assert isinstance(gate, Tensor)
            return inputs[0] * gate

    first, second = layers
    last = {Slot.PRE_DISPATCH_COMPUTATION: Writing, Reading.slot: lambda _: Reading()}
    joined = LayerPlan.join(
        [LayerPlan.build(first, nodes={Slot.PRE_DISPATCH_COMPUTATION: Plain}), LayerPlan.build(second, nodes=last)]
    )
    x = torch.randn(3, 4, dtype=torch.float64)
    once = torch.tanh(second(torch.tanh(first(x))))
    parameters = [*first.parameters(), *second.parameters()]
    expected = torch.autograd.grad((once * (once * 3)).sum(), parameters)
    run = SlotRun(joined)
    run.backward(torch.ones_like(run.forward(x)))
    for parameter, gradient in zip(parameters, expected, strict=True):
        assert parameter.grad is not None and torch.equal(parameter.grad, gradient)
