"""``check_node`` on weight-gradient hooks of one's own: what they name, ``W`` delivers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Linear, Parameter

from layernodes import NodeContext, Slot
from layernodes.testing import Check, NodeCheckError, NodeReport, check_node
from layernodes.testing.bench import NodeBench
from layernodes.testing.hooks import check_hooks
from tests.support import toy
from tests.support.held_back import HoldingLinear


def _fails(node: Any, check: Check, *words: str) -> NodeReport:
    with pytest.raises(NodeCheckError) as caught:
        check_node(node, toy.toys(1), toy.inputs(2), nodes=toy.NODES, plain=toy.Toy.forward, examples=1)
    texts = [str(finding) for finding in caught.value.report.findings if finding.check is check]
    assert any(all(word in text for word in words) for text in texts), str(caught.value)
    return caught.value.report


class _DrainingNode(toy.Middle):
    """Names its weight in a hook of its own, whose ``backward_dw`` is to be written."""

    def wgrad_hook(self) -> Any:
        return _Hook(self.linear)


class _Hook:
    def __init__(self, linear: Linear) -> None:
        self.linear = linear

    def backward_dw(self) -> None:
        """Nothing, though nothing was held back."""

    def parameters(self) -> list[Parameter]:
        return [self.linear.weight]


class TestHooks:
    """A hook that is no use is told of, though every number is right."""

    def test_a_hook_that_delivers_nothing(self) -> None:
        report = _fails(
            _DrainingNode,
            Check.LIFE_CYCLE,
            "the hook of _DrainingNode names linear.weight, and no W delivers any of it: it comes with B",
            "leave wgrad_hook() out",
        )
        assert len(report.findings) == 1

    def test_a_hook_that_names_nothing(self) -> None:
        class Nameless(_Hook):
            def parameters(self) -> list[Parameter]:
                return []

        class Idle(toy.Middle):
            def wgrad_hook(self) -> Any:
                return Nameless(self.linear)

        report = _fails(
            Idle, Check.LIFE_CYCLE, "the hook of Idle names no parameters", "let parameters() return the weights"
        )
        assert len(report.findings) == 1

    def test_a_module_without_backward_dw(self) -> None:
        class Calls(_Hook):
            def backward_dw(self) -> None:
                self.linear.backward_dw()

        class Calling(toy.Middle):
            def wgrad_hook(self) -> Any:
                return Calls(self.linear)

        _fails(Calling, Check.FORMULA, "W0.L0.mlp", "no attribute 'backward_dw'", "leave wgrad_hook() out")

    def test_no_hook_at_all(self) -> None:
        class Returns(toy.Middle):
            def wgrad_hook(self) -> Any:
                return self.linear

        _fails(Returns, Check.PLAN, "Returns.wgrad_hook() returned Linear, which has no 'backward_dw'")

    def test_a_module_that_holds_back(self) -> None:
        """What delivers one of several that it names is no fault; the bias comes with B."""

        class Held(toy.Middle):
            def __init__(self, layer: toy.Toy) -> None:
                super().__init__(layer)
                self.held = held

            def forward(self, ctx: NodeContext, *inputs: Tensor) -> Tensor:
                return torch.sin(self.held(inputs[0])[0] + self.linear.bias)

            def wgrad_hook(self) -> Any:
                return _HeldHook(self.held, self.linear.bias)

        layer = toy.toys(1)[0]
        held = HoldingLinear(layer.second.weight)
        bench = NodeBench([layer], {**toy.NODES, Slot.MLP: Held}, toy.inputs(2), toy.Toy.forward, "auto")
        assert list(check_hooks(bench, Slot.MLP)) == []
        assert held.drained == 2


class _HeldHook:
    def __init__(self, held: HoldingLinear, bias: Tensor) -> None:
        self._held, self._bias = held, bias

    def backward_dw(self) -> None:
        self._held.backward_dw()

    def parameters(self) -> list[Tensor]:
        return [self._held.weight, self._bias]
