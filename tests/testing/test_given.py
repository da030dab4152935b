"""``check_node`` says at once, in words, what it was given in place of what it takes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Linear

from layernodes import ArgumentError, LayerPlan, OptionError, PlanError, Slot
from layernodes.testing import check_node
from tests.support import toy

LAYER = toy.toys(1)[0]


def _unbound(x: Tensor) -> Tensor:
    return x


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"node": toy.Middle(LAYER)},
            r"node is a Middle, made already; give the class, Middle, or a function that takes the layer",
        ),
        ({"node": Linear}, r"node is the class Linear, which is no ScheduleNode; derive it from ScheduleNode"),
        ({"node": LAYER}, r"node is a Toy, a module; give a node class, or a function that takes the layer and ret"),
        ({"node": "Middle"}, r"node is 'Middle'; give a node class or a callable that takes the layer"),
        ({"layer": toy.Toy}, r"layer is the class Toy, where Module is wanted; give a torch.nn.Module, or several in"),
        ({"layer": toy.toys}, r"layer is of type function, where Module is wanted"),
        ({"layer": [LAYER, toy.Toy]}, r"layer\[1\] is the class Toy, where Module is wanted"),
        ({"batches": torch.ones(3, 6, 8)}, r"batches is one tensor \[3, 6, 8\]; give a list of 2 to 4 tensors, one"),
        ({"batches": {"x": 1}}, r"batches is of type dict, where Sequence is wanted; give a list"),
        ({"batches": (torch.ones(6, 8), {})}, r"batches\[1\] is of type dict; give a tensor, or \(tensor, dict\)"),
        ({"batches": [torch.ones(6, 8), (torch.ones(6, 8), 3)]}, r"batches\[1\] is \(Tensor, int\); give a tensor, or"),
        ({"nodes": [toy.First]}, r"nodes is of type list, where Mapping is wanted; give a dict"),
        ({"plain": LAYER}, r"plain is a Toy, a module; give the function that is called with the layer and its input"),
        ({"plain": LAYER.forward}, r"plain takes \(x\); it is called with the layer and its input: give MyLay"),
        ({"plain": _unbound}, r"plain takes \(x\); it is called with the layer and its input"),
        ({"plain": "forward"}, r"plain is 'forward'; give the function"),
        ({"examples": 2.5}, r"examples is 2\.5, where int is wanted"),
        ({"seed": None}, r"seed is None, where int is wanted"),
    ],
)
def test_of_another_kind(given: dict[str, Any], message: str) -> None:
    """Each is an ``ArgumentError``, raised before anything is run."""
    right: dict[str, Any] = {"node": toy.Middle, "layer": LAYER, "batches": toy.inputs(2), "nodes": toy.NODES}
    with pytest.raises(ArgumentError, match=message):
        check_node(**{**right, **given})


def test_no_layer() -> None:
    with pytest.raises(OptionError, match="layer is an empty list; give at least one"):
        check_node(toy.Middle, [], toy.inputs(2), nodes=toy.NODES)


def test_a_module_for_a_node_in_a_plan() -> None:
    """A plan says the same of its nodes."""
    nodes: Any = {**toy.NODES, Slot.MLP: LAYER.second}
    with pytest.raises(PlanError, match=r"nodes\[Slot.MLP\] is a Linear, a module; give a node class, or a function"):
        LayerPlan.build(LAYER, nodes=nodes)
