"""Cost models: looking up, reading and writing, and the presets' numbers."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from layernodes.errors import CostError
from layernodes.plan.costs import FREE, CostModel, SlotCost
from layernodes.plan.hardware import H100
from layernodes.plan.presets import PRESETS, preset
from layernodes.plan.shape import ChunkShape
from layernodes.slots import StreamType


def model() -> CostModel:
    return CostModel(
        name="mine",
        kinds={"moe": {"mlp": SlotCost(F=1, B=2, W=3, activation_bytes=4, wgrad_bytes=5)}},
        layers={3: {"mlp": SlotCost(F=9)}},
        ends={"post_process": SlotCost(F=7)},
        streams={"gate": StreamType.COMM},
        compute_slowdown=1.25,
        hardware_queues=1,
    )


def test_lookup() -> None:
    """A layer's own entry first, then its kind's; ends are free where left out."""
    costs = model()
    assert costs.cost(layer=0, kind="moe", slot="mlp").F == 1
    assert costs.cost(layer=3, kind="moe", slot="mlp").F == 9
    assert costs.cost(layer=3, kind="unknown", slot="mlp").F == 9
    assert costs.cost(layer=None, kind="", slot="post_process").F == 7
    assert costs.cost(layer=None, kind="", slot="pre_process") == FREE
    with pytest.raises(CostError, match=r"no cost for slot 'mpl' of layer 0.*\(it has 'mlp'\)"):
        costs.cost(layer=0, kind="moe", slot="mpl")
    with pytest.raises(CostError, match=r"kind 'dense' \(layer 1\); this model has 'moe'"):
        costs.cost(layer=1, kind="dense", slot="mlp")


def test_pass_throughs_are_free_in_a_table() -> None:
    """A dense layer needs no costs of dispatch and combine."""
    shape = ChunkShape.of(["dense"], pre_process=False, post_process=False)
    costs = CostModel.simple(computation=2, communication=1)
    table = costs.table(shape)
    assert {slot: cost.F for (_, slot), cost in table.items()} == {
        "pre_dispatch_computation": 2,
        "moe_dispatch": 0,
        "mlp": 2,
        "moe_combine": 0,
        "mtp_post_process": 0,
    }


def test_file_round_trip(tmp_path: Path) -> None:
    """Every field survives; defaults are left out."""
    path = tmp_path / "costs.json"
    for costs in (model(), CostModel.simple(computation=1, communication=2), PRESETS["mixtral-8x7b"].costs()):
        costs.save(path)
        assert CostModel.load(path) == costs
    assert "wgrad_bytes" not in CostModel(kinds={"moe": {"mlp": SlotCost(F=1)}}).to_json()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "it is no JSON (EOF"),
        ("{}", "kinds is missing; give it"),
        ('{"kinds": {"moe": {"mlp": {"F": -1}}}}', "kinds.moe.mlp.F"),
        ('{"kinds": {"moe": {"mlp": {"F": 1e999}}}}', "kinds.moe.mlp.F"),
        ('{"kinds": {"moe": {"mlp": {"G": 1}}}}', "kinds.moe.mlp.G is no field of SlotCost"),
        ('{"kinds": {"moe": {"pre_process": {}}}}', "go into 'ends'"),
        ('{"kinds": {}, "ends": {"mlp": {}}}', "no end of a chunk"),
        ('{"kinds": {}, "layers": {"x": {}}}', "layers.x"),
        ('{"kinds": {}, "compute_slowdown": 0.5}', "compute_slowdown"),
        ('{"kinds": {}, "hardware_queues": 0}', "hardware_queues"),
    ],
)
def test_bad_files_are_refused_with_the_place(text: str, message: str, tmp_path: Path) -> None:
    """Names the file, the field and what is wrong."""
    path = tmp_path / "costs.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(CostError, match=r"costs\.json cannot be read") as caught:
        CostModel.load(path)
    assert message in str(caught.value)


def test_other_bad_input(tmp_path: Path) -> None:
    """No UTF-8; values given in Python; frozen."""
    path = tmp_path / "costs.json"
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(CostError, match="byte 0 is no UTF-8"):
        CostModel.load(path)
    with pytest.raises(CostError, match="F is nan; give a finite number"):
        SlotCost(F=float("nan"))
    for value in ("1", True):
        for field in ("F", "activation_bytes"):
            with pytest.raises(CostError, match=f"{field} is {value!r}; give a valid number"):
                SlotCost(**{field: value})  # type: ignore[arg-type]
    with pytest.raises(CostError, match="kinds.moe.mlp.F is '1'; give a valid number"):
        CostModel.from_json('{"kinds": {"moe": {"mlp": {"F": "1"}}}}')
    path.write_text(model().to_json(), encoding="utf-8-sig")
    assert CostModel.load(path) == model()
    with pytest.raises(ValidationError):
        model().name = "other"  # type: ignore[misc]


def test_scale() -> None:
    """Each stream by its own factor, layers and ends included."""
    scaled = model().scale(computation=2, communication=3)
    assert scaled.kinds["moe"]["mlp"] == SlotCost(F=2, B=4, W=6, activation_bytes=4, wgrad_bytes=5)
    assert scaled.layers[3]["mlp"].F == 18
    assert scaled.ends["post_process"].F == 14
    assert CostModel.simple(computation=1, communication=1).scale(communication=3).kinds["moe"]["moe_combine"].B == 3
    with pytest.raises(CostError, match="communication=-1; give a finite number"):
        model().scale(communication=-1)


@pytest.mark.parametrize(("name", "billions"), [("deepseek-v3", 671), ("qwen3-235b-a22b", 235), ("mixtral-8x7b", 46.7)])
def test_presets_have_the_parameters_that_their_names_say(name: str, billions: float) -> None:
    """Counted from the preset's own numbers, within 1 %: so none of them is misspelt."""
    p = preset(name)
    head = p.vocabulary * p.hidden
    if p.kv_rank:
        attention = (
            p.hidden * p.q_rank
            + p.q_rank * p.heads * p.qk_dim
            + p.hidden * (p.kv_rank + p.rope_dim)
            + p.kv_rank * p.heads * (p.qk_dim - p.rope_dim + p.v_dim)
            + p.heads * p.v_dim * p.hidden
        )
    else:
        attention = p.hidden * (2 * p.heads + 2 * p.kv_heads) * p.qk_dim
    expert = 3 * p.hidden * p.expert_ffn
    moe = (p.experts + p.shared_experts) * expert + p.hidden * p.experts
    total = 2 * head + p.num_layers * attention + (p.num_layers - p.num_dense) * moe
    total += p.num_dense * 3 * p.hidden * p.dense_ffn
    assert total == pytest.approx(billions * 1e9, rel=0.01)


def test_a_preset_by_hand() -> None:
    """Mixtral's experts and exchange, worked out by hand for 4096 tokens on an H100."""
    costs = PRESETS["mixtral-8x7b"].costs()
    flops = 2 * 3 * 4096 * 14336 * 2 * 4096
    assert pytest.approx(flops / (989.4e12 * 0.55)) == costs.kinds["moe"]["mlp"].W
    copies = 8 * (1 - (7 / 8) ** 2) * 7 / 8
    assert pytest.approx(4096 * copies * 4096 * 2 / 155e9 + 30e-6) == costs.kinds["moe"]["moe_dispatch"].F


def test_the_head_of_a_preset_is_in_post_process() -> None:
    """The node of ``mtp_post_process`` is a norm: 2 bytes of each of 4096 x 4096 numbers, read and written."""
    costs = PRESETS["mixtral-8x7b"].costs()
    norm = costs.kinds["moe"]["mtp_post_process"]
    assert pytest.approx(2 * 4096 * 4096 * 2 / (0.8 * 3.35e12)) == norm.F
    assert norm.W == 0
    assert costs.ends["post_process"].F > 10 * norm.F


def test_presets_have_what_they_need() -> None:
    """Sources, shapes, and costs for every slot, also of fewer tokens."""
    for p in PRESETS.values():
        assert "arXiv" in p.source
        assert p.shape().num_layers == p.num_layers
        half, whole = p.costs(tokens=2048), p.costs(H100)
        assert pytest.approx(whole.kinds["moe"]["mlp"].F / 2) == half.kinds["moe"]["mlp"].F
        whole.table(ChunkShape.of(["dense", "moe"], mtp=1, split_combine=True, wgrad=True))
    with pytest.raises(CostError, match="unknown preset 'gpt'"):
        preset("gpt")
    with pytest.raises(CostError, match="tokens=0"):
        PRESETS["mixtral-8x7b"].costs(tokens=0)
