"""Shapes: which slots a chunk has."""

from __future__ import annotations

import pytest

from layernodes.errors import PlanError
from layernodes.plan.shape import ChunkShape, LayerShape, SlotShape
from layernodes.plan.step import Step
from layernodes.slots import ExtraSlot, Slot, StreamType


def test_example_of_design() -> None:
    """Layers are numbered through decoder and MTP; dense layers pass through, MTP post-process only in MTP."""
    shape = ChunkShape.of(["moe", "dense"], mtp=1, pre_process=True, post_process=True, wgrad=False)
    assert [(layer.kind, layer.mtp) for layer in shape.layers] == [("moe", False), ("dense", False), ("moe", True)]
    assert [layer.passthrough for layer in shape.layers] == [
        {"mtp_post_process"},
        {"moe_dispatch", "moe_combine", "mtp_post_process"},
        frozenset(),
    ]
    assert shape.wgrad_slots == ((), (), ())
    assert shape.ends == ("pre_process", "post_process")
    assert shape.num_layers == 3
    assert hash(shape) == hash(ChunkShape.of(["moe", "dense"], mtp=["moe"]))


def test_streams() -> None:
    """Dispatch and combine are communication, everything else computation."""
    (layer,) = ChunkShape.of(["moe"]).layers
    assert [slot.name for slot in layer.slots if slot.stream is StreamType.COMM] == ["moe_dispatch", "moe_combine"]


def test_wgrad_defers_two_slots_of_every_layer() -> None:
    """wgrad=True defers pre_dispatch_computation and mlp; a collection names the slots."""
    assert ChunkShape.of(["moe", "dense"], mtp=1, wgrad=True).wgrad_slots == (("pre_dispatch_computation", "mlp"),) * 3
    assert ChunkShape.of(["moe", "dense"], wgrad=["mlp"]).wgrad_slots == (("mlp",),) * 2
    combine = ChunkShape.of(["moe", "dense"], wgrad=[Slot.MOE_COMBINE])
    assert combine.wgrad_slots == (("moe_combine",), ())  # a pass-through has nothing to defer


def test_split_combine_and_extra_slots() -> None:
    """post_combine stands before MTP post-process; own slots follow their anchor in the given order."""
    own = [
        ExtraSlot("a", after=Slot.MLP),
        ExtraSlot("b", after=Slot.MLP, stream=StreamType.COMM),
        ExtraSlot("c", after="a"),
    ]
    (layer,) = ChunkShape.of(["moe"], split_combine=True, extra_slots=own).layers
    assert layer.slot_names == (
        "pre_dispatch_computation", "moe_dispatch", "mlp", "a", "c", "b",
        "moe_combine", "post_combine", "mtp_post_process",
    )  # fmt: skip
    assert layer.find("b") == SlotShape(name="b", stream=StreamType.COMM)
    assert ChunkShape.of(["dense"], split_combine=True).layers[0].find("post_combine") == SlotShape(
        name="post_combine", passthrough=True
    )


def test_a_layer_that_is_not_megatrons() -> None:
    """uses= names the slots that do something; the rest pass through; shapes can be made field by field."""
    layer = LayerShape.of("conv", uses=[Slot.MLP], wgrad=True)
    assert layer.passthrough == set(Slot) - {Slot.MLP, Slot.POST_COMBINE}
    assert layer.wgrad_slots == ("mlp",)
    own = LayerShape(kind="own", slots=(SlotShape(name="x", wgrad=True), SlotShape(name="y")))
    shape = ChunkShape(layers=(layer, own), pre_process=False, post_process=False)
    assert shape.wgrad_slots == (("mlp",), ("x",))
    assert [str(place.slot.name) for place in shape.places() if place.layer == 1] == ["x", "y"]


def test_find() -> None:
    """find gives the slot of a step, or None where the chunk has none such."""
    shape = ChunkShape.of(["moe"], post_process=False)
    assert shape.find(Step.parse("F0.pre_process")) == SlotShape(name="pre_process")
    assert shape.find(Step.parse("F7.L0.moe_dispatch")) == SlotShape(name="moe_dispatch", stream=StreamType.COMM)
    for text in ("F0.post_process", "F0.mlp", "F0.L1.mlp", "F0.L0.pre_process"):
        assert shape.find(Step.parse(text)) is None


def test_text() -> None:
    """str describes the chunk in a line."""
    assert str(ChunkShape.of(["moe", "dense"], mtp=1, wgrad=True, post_process=False)) == (
        "pre_process | L0 moe | L1 dense | L2 moe mtp; W: pre_dispatch_computation, mlp"
    )
    assert str(ChunkShape.of([], pre_process=False)) == "post_process"
    assert str(ChunkShape(pre_process=False, post_process=False)) == "empty chunk"


def test_refusals() -> None:
    """What makes no sense is a PlanError that says what to change."""
    with pytest.raises(PlanError, match=r"'mixture'; choose one of moe, dense"):
        ChunkShape.of(["mixture"])
    with pytest.raises(PlanError, match=r"give a list with one kind a layer"):
        ChunkShape.of("moe")
    with pytest.raises(PlanError, match="mtp=-1"):
        ChunkShape.of([], mtp=-1)
    with pytest.raises(PlanError, match=r"wgrad names post_attn; this layer has pre_dispatch"):
        ChunkShape.of(["moe"], wgrad=["post_attn"])
    with pytest.raises(PlanError, match="own follows post_combine; this layer has"):
        ChunkShape.of(["moe"], extra_slots=[ExtraSlot("own", after=Slot.POST_COMBINE)])
    with pytest.raises(PlanError, match="share a name"):
        ChunkShape.of(["moe"], extra_slots=[ExtraSlot("own", after=Slot.MLP)] * 2)
    with pytest.raises(PlanError, match="list the decoder's layers first"):
        ChunkShape(layers=(LayerShape.of("moe", mtp=True), LayerShape.of("moe")))
    with pytest.raises(PlanError, match="pass-through"):
        SlotShape(name="x", passthrough=True, wgrad=True)
    for name in ("mlp", "pre_process", "L3", "two words", ""):
        with pytest.raises(PlanError, match="cannot name"):
            ExtraSlot(name, after=Slot.MLP)
    for name in ("L3", "two words", ""):
        with pytest.raises(PlanError, match="cannot name"):
            SlotShape(name=name)


def test_a_number_is_no_list_of_layers() -> None:
    """The message shows the list that is wanted."""
    with pytest.raises(PlanError, match=r"layers is 2; give a list with one kind a layer, such as \['moe', 'moe'\]"):
        ChunkShape.of(2)  # type: ignore[arg-type]
