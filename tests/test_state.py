"""Handoffs: each is written once and taken once, and belongs to one layer and microbatch."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron.core.models.common.utils import TransformerLayerNode
from torch import Tensor

from layernodes import Handoffs, NodeContext, NodeStateError
from layernodes.state import fits, handoffs_of, spelling


def test_written_once_and_taken_once() -> None:
    """What was taken is forgotten, and cannot be taken or written again."""
    handoffs = Handoffs()
    value = object()
    handoffs.write("x", value)
    assert handoffs.pending() == ("x",)
    assert handoffs.take("x") is value
    assert handoffs.pending() == ()
    assert handoffs.unwritten(["x"]) == []
    with pytest.raises(NodeStateError, match=r"'x' has already been taken; each is taken once .*nothing"):
        handoffs.take("x")
    with pytest.raises(NodeStateError, match="'x' is written a second time for this layer and microbatch"):
        handoffs.write("x", value)


def test_taking_early_says_what_waits() -> None:
    """The message lists what is there."""
    handoffs = Handoffs()
    handoffs.write("a", 1)
    with pytest.raises(
        NodeStateError, match=r"'x' has not been written yet; run the slot .*\(waiting to be taken: \['a'\]"
    ):
        handoffs.take("x")
    assert handoffs.unwritten(["x"]) == ["x"]


def test_none_is_a_value() -> None:
    """A handoff of None is there until it is taken."""
    handoffs = Handoffs()
    handoffs.write("x", None)
    assert handoffs.pending() == ("x",)
    assert handoffs.take("x") is None


def test_each_state_has_its_own() -> None:
    """Handoffs hang on the object of one layer and microbatch, made on first use."""
    one, other = SimpleNamespace(), SimpleNamespace()
    handoffs_of(one).write("x", 1)
    assert handoffs_of(one) is handoffs_of(one)
    assert handoffs_of(other).pending() == ()


def test_no_attributes_beside() -> None:
    """Nothing else can be left on them."""
    with pytest.raises(AttributeError):
        Handoffs().x = 1  # type: ignore[attr-defined]


def test_declared_types() -> None:
    """Classes and unions; None only where the union says so."""
    tensor = torch.ones(1)
    assert fits(tensor, Tensor)
    assert not fits(None, Tensor)
    assert fits(None, Tensor | None)
    assert spelling(Tensor) == "Tensor"
    assert "None" in spelling(Tensor | None)


def test_megatrons_node_satisfies_the_protocol() -> None:
    """A node made as Megatron-Core's schedule plan makes it has everything that ``NodeContext`` names."""
    config = SimpleNamespace(moe_ncclep_zero_copy=False)
    node = TransformerLayerNode(None, None, object(), object(), print, extra_args={"config": config})
    assert isinstance(node, NodeContext)


@given(st.lists(st.tuples(st.sampled_from(["write", "take"]), st.sampled_from("abc")), max_size=20))
@settings(deadline=None)
def test_any_sequence_of_verbs(verbs: list[tuple[str, str]]) -> None:
    """A name is written before it is taken, each at most once; whatever breaks that raises and changes nothing."""
    handoffs = Handoffs()
    written: list[str] = []
    taken: list[str] = []
    for verb, name in verbs:
        allowed = name not in written if verb == "write" else name in written and name not in taken
        try:
            handoffs.write(name, name) if verb == "write" else handoffs.take(name)
        except NodeStateError:
            assert not allowed
        else:
            assert allowed
            (written if verb == "write" else taken).append(name)
        assert sorted(handoffs.pending()) == sorted(set(written) - set(taken))
