"""What grouping is for: communication of a hybrid model beside attention, as in a model whose layers have both."""

from __future__ import annotations

import pytest

from layernodes import ChunkPlan, ChunkShape, CostModel, Slot, SlotCost, preset, schedules, simulate
from layernodes.plan.presets import PRESETS
from tests.support.build import make_model
from tests.support.configs import Cell
from tests.support.fixtures import MEGATRON_WORLD, megatron_world  # noqa: F401
from tests.support.hybrid_cells import hybrid_cell

pytestmark = MEGATRON_WORLD

_LAYERS, _MICROBATCHES = 6, 4
_PRE = Slot.PRE_DISPATCH_COMPUTATION
_SYMBOLS = {"moe": "*E", "dense": "*-"}


def _minus(a: SlotCost, b: SlotCost) -> SlotCost:
    return SlotCost(F=a.F - b.F, B=a.B - b.B, W=a.W - b.W)


def _costs(name: str) -> CostModel:
    """The preset's costs, also for the layers of a hybrid model: attention costs what it costs in a dense layer."""
    costs = preset(name).costs()
    moe, dense = costs.kinds["moe"], costs.kinds["dense"]
    kinds = {
        **costs.kinds,
        "*E": moe,
        "*-": dense,
        "*": {_PRE: dense[_PRE]},
        "-": {Slot.MLP: dense[Slot.MLP]},
        "E": {**moe, _PRE: _minus(moe[_PRE], dense[_PRE])},
    }
    return costs.model_copy(update={"kinds": kinds})


def _shape(kinds: list[str], wgrad: str, group: bool | None) -> ChunkShape:
    """The shape of a real model's plan: a GPT model's where ``group`` is None."""
    if group is None:
        cell = Cell(name="gpt", layers="".join("M" if kind == "moe" else "D" for kind in kinds))
        return ChunkPlan.build(make_model(cell), wgrad=wgrad).shape
    model = make_model(hybrid_cell("".join(_SYMBOLS[kind] for kind in kinds)))
    return ChunkPlan.build(model, wgrad=wgrad, group=group).shape


@pytest.mark.parametrize("wgrad", ["off", "auto"])
@pytest.mark.parametrize("name", PRESETS)
def test_a_grouped_plan_exposes_no_more_than_a_gpt_chunk(name: str, wgrad: str) -> None:
    """On every preset, under Megatron-Core's order; a plan of single layers exposes more."""
    costs = _costs(name)
    kinds = [layer.kind for layer in preset(name).shape(num_layers=_LAYERS).layers]
    assert "moe" in kinds
    timelines = {}
    for group in (None, True, False):
        shape = _shape(kinds, wgrad, group)
        order = schedules.combined_1f1b(shape, _MICROBATCHES)
        timelines[group] = simulate(order, costs, shape)
    gpt, grouped, single = timelines[None], timelines[True], timelines[False]
    assert grouped.exposed_communication <= gpt.exposed_communication
    assert grouped.makespan <= gpt.makespan
    assert single.exposed_communication > grouped.exposed_communication
