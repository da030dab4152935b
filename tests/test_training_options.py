"""``schedule(split_combine=..., nodes=..., layer_hooks=...)`` inside the training loop: same bits, really used."""

from __future__ import annotations

from collections import Counter
from typing import Any, ClassVar

import pytest
from megatron.core.transformer.enums import CudaGraphModule
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor

from layernodes import (
    CombineNode,
    ExpertNode,
    ExtraSlot,
    LayerHooks,
    PairSchedule,
    PlanError,
    Slot,
    StreamType,
    UnsupportedLayerError,
)
from layernodes._megatron import constraints
from layernodes.megatron import schedule
from layernodes.nodes import ScheduleNode
from layernodes.plan import pairs
from tests.support.fixtures import MEGATRON_WORLD, megatron_world
from tests.support.held_back import hold_back
from tests.support.training import PLAIN, WAYS, Case, Trainer, Way, train

__all__ = ["megatron_world"]

pytestmark = MEGATRON_WORLD

_SOME = (WAYS[0], WAYS[3], WAYS[4], WAYS[6])
_STEPS = 2


def _noting_rule(way: Way, seen: list[PairSchedule]) -> Any:
    """The order of a way, as a user's function that keeps what it returned."""
    rule = pairs.BUILT_IN[way.order] if isinstance(way.order, str) else way.order

    def order(forward: Any, backward: Any) -> PairSchedule:
        found: PairSchedule = rule(forward, backward)
        if way.wgrad == "auto":
            found = pairs.deferred(found, forward, backward, "first_layer_last")
        seen.append(found)
        return found

    return order


@pytest.mark.parametrize("way", _SOME, ids=str)
@pytest.mark.parametrize("mtp", [0, 1])
def test_split_combine(way: Way, mtp: int) -> None:
    """What follows the combine exchange has steps of its own; losses and parameters are the plain run's."""
    case = Case(name="split", layers="DM", bf16=True, mtp=mtp, tied=bool(mtp))
    seen: list[PairSchedule] = []
    trainer = Trainer(case)
    trainer.run(Way(order=_noting_rule(way, seen), wgrad=way.wgrad, streams=way.streams), _STEPS, split_combine=True)
    assert train(case, PLAIN, _STEPS).difference(trainer.trained()) is None
    both = max(seen, key=len)
    moe = [1, 2] if mtp else [1]
    for phase in ("F0", "B1"):
        assert sorted(step.layer for step in both if str(step).startswith(phase) and step.slot == "post_combine") == moe


def test_split_combine_by_name() -> None:
    """A built-in order, with and without deferral, as a user writes it."""
    case = Case(name="split")
    plain = train(case, PLAIN, _STEPS)
    for way in WAYS[:2]:
        trainer = Trainer(case)
        trainer.run(way, _STEPS, split_combine=True)
        assert plain.difference(trainer.trained()) is None
    with schedule(trainer.chunks, split_combine=True) as session:
        assert all("post_combine" in [slot.name for slot in layer.slots] for layer in session.chunks[0].shape.layers)


class _CountingExperts(ExpertNode):
    """Megatron-Core's experts, counted."""

    calls: ClassVar[Counter[str]] = Counter()

    def forward(self, ctx: Any, *inputs: Tensor) -> Any:
        self.calls["experts"] += 1
        return super().forward(ctx, *inputs)


class _HalvedCombine(CombineNode):
    """Halves what the layer returns."""

    def forward(self, ctx: Any, *inputs: Tensor) -> Any:
        return super().forward(ctx, *inputs) * 0.5


class _Doubled(ScheduleNode):
    """A slot of the user's own."""

    slot = ExtraSlot("doubled", after=Slot.MOE_COMBINE)
    stream = StreamType.COMPUTE

    def __init__(self, layer: Any) -> None:
        self.calls = 0

    def forward(self, ctx: Any, *inputs: Tensor) -> Tensor:
        self.calls += 1
        return inputs[0] * 2


@pytest.mark.parametrize("way", _SOME, ids=str)
def test_nodes_of_the_users_own(way: Way) -> None:
    """One that counts: called once for each microbatch and MoE layer; the bits are the plain run's."""
    case = Case(name="nodes", mtp=1)
    _CountingExperts.calls.clear()
    trainer = Trainer(case)
    trainer.run(way, _STEPS, nodes={Slot.MLP: _CountingExperts})
    assert _CountingExperts.calls == {"experts": _STEPS * case.num_microbatches * 3}
    assert train(case, PLAIN, _STEPS).difference(trainer.trained()) is None


@pytest.mark.parametrize("way", _SOME[:2], ids=str)
def test_nodes_that_change_the_numbers(way: Way) -> None:
    """Halved by one node, and doubled again by one in an extra slot, exactly; halved alone, the losses differ."""
    case = Case(name="nodes")
    plain = train(case, PLAIN, _STEPS)
    both, halved = Trainer(case), None
    both.run(way, _STEPS, nodes={Slot.MOE_COMBINE: _HalvedCombine, _Doubled.slot: _Doubled})
    assert plain.difference(both.trained()) is None
    halved = Trainer(case)
    halved.run(way, _STEPS, nodes={Slot.MOE_COMBINE: _HalvedCombine})
    assert "loss 0" in str(plain.difference(halved.trained()))


def test_a_node_for_a_slot_that_no_layer_has() -> None:
    """Refused on entering, and Megatron-Core is as before."""
    trainer = Trainer(Case(name="nodes", layers="DD"))
    config = trainer.config
    with pytest.raises(PlanError, match="moe_combine"), schedule(trainer.chunks, nodes={Slot.MOE_COMBINE: CombineNode}):
        pass
    assert not config.overlap_moe_expert_parallel_comm


def test_what_deferral_alone_needs_is_asked_for_with_deferral_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Partial CUDA graphs with an old Transformer Engine: refused with ``wgrad="auto"``, entered with ``"off"``."""
    monkeypatch.setattr(constraints, "is_te_min_version", lambda _: False)
    trainer = Trainer(Case(name="graphs", ddp=None))
    trainer.config.cuda_graph_impl = "transformer_engine"
    trainer.config.cuda_graph_modules = [CudaGraphModule.attn]
    with schedule(trainer.chunks, wgrad="off") as session:
        assert len(session.chunks) == 1
    with pytest.raises(UnsupportedLayerError) as caught, schedule(trainer.chunks, wgrad="auto"):
        pass
    assert [violation.field for violation in caught.value.violations] == ["cuda_graph_impl"]


def test_gradients_held_back_without_w_steps_are_refused() -> None:
    """Transformer Engine's modules under ``delay_wgrad_compute`` would keep theirs; with W steps they deliver them."""
    trainer = Trainer(Case(name="held back", ddp=None))
    held = hold_back(trainer.chunks[0].decoder.layers[0].mlp.experts.local_experts[0], "linear_fc1")
    trainer.config.delay_wgrad_compute = True
    with pytest.raises(UnsupportedLayerError, match="wgrad='auto'") as caught, schedule(trainer.chunks, wgrad="off"):
        pass
    assert [violation.field for violation in caught.value.violations] == ["delay_wgrad_compute"]
    assert trainer.config.delay_wgrad_compute
    trainer.run(Way(order="combined_1f1b", wgrad="auto"), 1)
    assert held.drained == trainer.case.num_microbatches
    assert not held.queue


@pytest.mark.parametrize("way", _SOME, ids=str)
def test_layer_hooks_of_every_microbatch(way: Way) -> None:
    """Each of the four is called once for each microbatch and layer, in that order for a layer and microbatch."""
    case = Case(name="hooks", layers="MDM")
    trainer = Trainer(case)
    calls: Counter[tuple[str, Any]] = Counter()

    def note(name: str) -> Any:
        def call(layer: Any) -> None:
            assert isinstance(layer, TransformerLayer)
            calls[name, layer.layer_number] += 1
            order = [calls[one, layer.layer_number] for one in names]
            assert order == sorted(order, reverse=True)

        return call

    names = ("before_forward", "after_forward", "before_backward", "after_backward")
    trainer.run(way, _STEPS, layer_hooks=LayerHooks(**{name: note(name) for name in names}))
    assert set(calls) == {(name, number) for name in names for number in (1, 2, 3)}
    assert set(calls.values()) == {_STEPS * case.num_microbatches}
    assert train(case, PLAIN, _STEPS).difference(trainer.trained()) is None
