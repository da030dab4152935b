"""``check_node`` passes good nodes, and says of bad ones what is wrong and what to do."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor
from torch.nn import Dropout, Linear, Module, Parameter

from layernodes import CombineNode, NodeContext, OptionError, ScheduleNode, Slot, StreamType
from layernodes.state import HandoffMap
from layernodes.testing import Check, NodeCheckError, NodeReport, check_node
from tests.support import toy
from tests.support.build import make_model
from tests.support.configs import Cell
from tests.support.fixtures import MEGATRON_WORLD, megatron_world  # noqa: F401

pytestmark = MEGATRON_WORLD


def _check(node: Any, *, layers: int = 1, examples: int = 6, plain: Any = toy.Toy.forward, **nodes: Any) -> NodeReport:
    others = {**toy.NODES, **{Slot(name): value for name, value in nodes.items()}}
    return check_node(node, toy.toys(layers), toy.inputs(3), nodes=others, plain=plain, examples=examples)


def _fails(node: Any, check: Check, *words: str, **options: Any) -> NodeReport:
    with pytest.raises(NodeCheckError) as caught:
        _check(node, **options)
    report = caught.value.report
    texts = [str(finding) for finding in report.findings if finding.check is check]
    assert any(all(word in text for word in words) for text in texts), str(report)
    assert str(report) == str(caught.value)
    return report


class TestGoodNodes:
    """What is right passes, and every check has run."""

    @pytest.mark.parametrize("slot", toy.SLOTS)
    def test_toy_nodes(self, slot: Slot) -> None:
        report = _check(toy.NODES[slot], layers=2)
        assert report.findings == ()
        assert report.done == tuple(Check)
        assert report.faults >= 5
        assert report.schedules >= 20
        assert "nothing wrong" in str(report)

    def test_megatron_layer_and_its_own_node(self) -> None:
        class Halved(CombineNode):
            def forward(self, ctx: NodeContext, *inputs: Tensor) -> Tensor:
                return super().forward(ctx, *inputs) * 0.5

        model: Any = make_model(Cell(name="check", layers="M", config={"hidden_dropout": 0.1}))
        batches = [(torch.randn(4, 1, 32), {}) for _ in range(2)]
        report = check_node(Halved, model.decoder.layers[0], batches, examples=4)
        assert report.done == tuple(Check)

        def halved(layer: Any, x: Tensor) -> Tensor:
            output: Tensor = layer(x, attention_mask=None)[0]
            return output * 0.5

        check_node(Halved, model.decoder.layers[0], batches, plain=halved, examples=2)

    def test_a_node_that_draws(self) -> None:
        class Dropping(toy.Middle):
            def __init__(self, layer: toy.Toy) -> None:
                super().__init__(layer)
                self.dropout = Dropout(0.5)

            def forward(self, ctx: NodeContext, *inputs: Tensor) -> Tensor:
                return self.dropout(super().forward(ctx, *inputs))  # type: ignore[no-any-return]

            def touches_rng(self) -> bool:
                return True

        def plainly(layer: toy.Toy, x: Tensor) -> Tensor:
            wide = torch.tanh(layer.first(x))
            return torch.nn.functional.dropout(torch.sin(layer.second(wide * 0.5 * 2.0)), 0.5) * 1.5 + wide

        assert _check(Dropping, plain=plainly, layers=2).findings == ()


class _Stash(toy.First):
    """Leaves a tensor on its layer, where the microbatch that comes next overwrites it."""

    def forward(self, ctx: NodeContext, *inputs: Tensor) -> Tensor:
        output = super().forward(ctx, *inputs)
        self.fuse.scale = output.detach() * 2  # type: ignore[attr-defined]
        return output


class _ScaledBackward(torch.autograd.Function):
    """x tanh(x) with a gradient that reads the layer's object, not what belongs to the microbatch."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, shared: Any) -> Tensor:
        ctx.shared = shared
        shared.value = x.detach()
        return x * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return gradient * 2 * ctx.shared.value, None


class TestBadNodes:
    """Each fault is found by the check that is for it."""

    def test_wrong_slot_and_undeclared_handoff(self) -> None:
        class Takes(toy.Middle):
            reads: ClassVar[HandoffMap] = {"nothing": Tensor}

        report = _fails(Takes, Check.PLAN, "reads 'nothing'", "no earlier slot of this layer writes")
        assert report.done == (Check.PLAN,)
        assert "not looked at before these are mended: formula, interleaving" in str(report)

    def test_no_node(self) -> None:
        _fails(lambda layer: layer, Check.PLAN, "made Toy", "give a node class")

    def test_wrong_formula(self) -> None:
        class Halves(toy.Return):
            def forward(self, ctx: NodeContext, *inputs: Tensor) -> Tensor:
                return super().forward(ctx, inputs[0] * 0.5)

        _fails(Halves, Check.FORMULA, "output of microbatch 0 (is wrong)", "compare forward")

    def test_an_error_of_the_node(self) -> None:
        """Its own words, and no word of microbatches that interleave: they came one after the other."""

        class Two(toy.Return):
            def forward(self, ctx: NodeContext, *inputs: Tensor) -> Tensor:
                return super().forward(ctx, *inputs), None  # type: ignore[return-value]

        report = _fails(Two, Check.FORMULA, "the last slot returned 2 values", "mend what the message says")
        assert "interleave" not in report.findings[0].advice

    def test_lost_gradient(self) -> None:
        class Detaches(toy.Return):
            def forward(self, ctx: NodeContext, *inputs: Tensor) -> Tensor:
                return super().forward(ctx, inputs[0].detach())

        _fails(Detaches, Check.FORMULA, "gradient of layer 0's second.weight", "never detached")

    def test_undeclared_read(self) -> None:
        class Reads(toy.Middle):
            def forward(self, ctx: NodeContext, *inputs: Tensor) -> Tensor:
                return super().forward(ctx, inputs[0] + 0.0 * self.fuse.scale)  # type: ignore[attr-defined]

        report = _fails(Reads, Check.HAPPENS_BEFORE, "reads what", "declare", pre_dispatch_computation=_Stash)
        assert any(finding.check is Check.MEMORY for finding in report.findings)

    def test_missing_wait(self) -> None:
        """A buffer that one stream fills and the other reads: in inline order right, on streams a race."""
        buffer = torch.zeros(6, 8, dtype=torch.float64)

        class Fills(toy.First):
            def forward(self, ctx: NodeContext, *inputs: Tensor) -> Tensor:
                output = super().forward(ctx, *inputs)
                buffer.copy_(output.detach())
                return output

        class Reads(toy.Send):
            def forward(self, ctx: NodeContext, *inputs: Tensor) -> Tensor:
                return super().forward(ctx, inputs[0] + 0.0 * buffer)

        _fails(Reads, Check.HAPPENS_BEFORE, "without waiting for it", "handoff", pre_dispatch_computation=Fills)

    def test_wrong_gradient_under_interleaving(self) -> None:
        class Shares(toy.Middle):
            def forward(self, ctx: NodeContext, *inputs: Tensor) -> Tensor:
                output: Tensor = _ScaledBackward.apply(super().forward(ctx, *inputs), self.fuse)
                return output

        def plainly(layer: toy.Toy, x: Tensor) -> Tensor:
            wide = torch.tanh(layer.first(x))
            inner = torch.sin(layer.second(wide * 0.5 * 2.0))
            return inner * inner * 1.5 + wide

        report = _fails(Shares, Check.INTERLEAVING, "schedules.forward_forward", "(is wrong)", plain=plainly)
        assert "keep nothing of a microbatch on the node" in str(report)

    def test_leak(self) -> None:
        class Keeps(toy.Middle):
            def __init__(self, layer: toy.Toy) -> None:
                super().__init__(layer)
                self.seen: list[Tensor] = []

            def forward(self, ctx: NodeContext, *inputs: Tensor) -> Tensor:
                output = super().forward(ctx, *inputs)
                self.seen = [output.detach()]
                return output

        report = _fails(Keeps, Check.MEMORY, "made in F2.L0.mlp", "held by Keeps.seen", "save_for_backward")
        assert any("a run changes Keeps.seen" in str(finding) for finding in report.findings)

    def test_cycle(self) -> None:
        """A tensor that only the garbage collector would free is a leak."""

        class Cycle:
            def __init__(self, tensor: Tensor) -> None:
                self.tensor, self.me = tensor, self

        class Cycles(toy.Middle):
            def forward(self, ctx: NodeContext, *inputs: Tensor) -> Tensor:
                output = super().forward(ctx, *inputs)
                Cycle(output.detach() * 1.0)
                return output

        _fails(Cycles, Check.MEMORY, "made in F0.L0.mlp")

    def test_exception_that_leaves_state(self) -> None:
        class Busy(toy.Middle):
            def __init__(self, layer: toy.Toy) -> None:
                super().__init__(layer)
                self.is_busy = False

            def forward(self, ctx: NodeContext, *inputs: Tensor) -> Tensor:
                self.is_busy = True
                output = super().forward(ctx, *inputs)
                self.is_busy = False
                return output

        report = _fails(Busy, Check.FAULTS, "an exception in F0.L0.mlp", "Busy.is_busy", "finally")
        assert {finding.check for finding in report.findings} == {Check.FAULTS}

    def test_swallowed_exception(self) -> None:
        class Swallows(toy.Middle):
            def forward(self, ctx: NodeContext, *inputs: Tensor) -> Tensor:
                with contextlib.suppress(Exception):
                    inputs[0].sum()
                return super().forward(ctx, *inputs)

        _fails(Swallows, Check.FAULTS, "an exception in F0.L0.mlp was swallowed", "no bare except")

    def test_random_numbers_not_told_of(self) -> None:
        class Draws(toy.Middle):
            def forward(self, ctx: NodeContext, *inputs: Tensor) -> Tensor:
                return super().forward(ctx, *inputs) + 0.0 * torch.rand(1)

        _fails(Draws, Check.LIFE_CYCLE, "Draws.touches_rng() is False", "return True")

    def test_kept_input_not_told_of(self) -> None:
        class Frees(toy.Middle):
            def keeps_input(self) -> bool:
                return False

        _fails(Frees, Check.LIFE_CYCLE, "Frees.keeps_input() is False", "too early")

    def test_forward_that_depends_on_grad_mode(self) -> None:
        class Modal(toy.Middle):
            def forward(self, ctx: NodeContext, *inputs: Tensor) -> Tensor:
                output = super().forward(ctx, *inputs)
                return output if torch.is_grad_enabled() else output * 2

        _fails(Modal, Check.LIFE_CYCLE, "a forward alone", "is_grad_enabled")

    def test_hook_that_two_microbatches_share(self) -> None:
        class Late(Module):
            def __init__(self, weight: Parameter) -> None:
                super().__init__()
                self.weight = weight

        class Hook:
            def __init__(self, linear: Linear) -> None:
                self._linear = linear

            def backward_dw(self) -> None:
                """Nothing was deferred."""

            def parameters(self) -> Iterable[Parameter]:
                return ()

        class Shares(toy.Middle):
            def __init__(self, layer: toy.Toy) -> None:
                super().__init__(layer)
                self.hook = Hook(layer.second)

            def wgrad_hook(self) -> Hook:
                return self.hook

        _fails(Shares, Check.LIFE_CYCLE, "returns the same object twice", "fresh hook")


def test_parameters_that_the_node_makes() -> None:
    """They are others in each plan."""

    class Own(toy.Send):
        def __init__(self, layer: toy.Toy) -> None:
            super().__init__(layer)
            self.projection = Linear(8, 8, dtype=torch.float64)

        def forward(self, ctx: NodeContext, *inputs: Tensor) -> Tensor:
            return super().forward(ctx, self.projection(inputs[0]))

    report = _fails(Own, Check.PLAN, "Own makes parameters of its own: projection.weight, projection.bias", "let the l")
    assert report.done == (Check.PLAN,)


def test_several_faults_are_told_at_once() -> None:
    """The text lists every finding, and what was done."""

    class Bad(toy.Middle):
        def forward(self, ctx: NodeContext, *inputs: Tensor) -> Tensor:
            self.last = inputs[0]
            return super().forward(ctx, *inputs)

    report = _fails(Bad, Check.LIFE_CYCLE, "a run changes Bad.last")
    assert len(report.findings) >= 2
    assert str(report).startswith(f"Bad: {len(report.findings)} found (plan, formula, interleaving")


def test_arguments() -> None:
    """One batch alone is refused, and so is a node on a layer that lacks the others."""
    with pytest.raises(OptionError, match="one alone cannot be interleaved"):
        check_node(toy.Middle, toy.toys(1), toy.inputs(1), nodes=toy.NODES)
    with pytest.raises(OptionError, match="examples=0"):
        check_node(toy.Middle, toy.toys(1), toy.inputs(2), nodes=toy.NODES, examples=0)


def test_declared_without_a_plain_layer() -> None:
    """A layer without a forward of its own is compared with its nodes in one graph."""

    class Only(ScheduleNode):
        slot = Slot.MLP
        stream = StreamType.COMPUTE

        def __init__(self, layer: Any) -> None:
            self.linear = layer["linear"]

        def forward(self, ctx: NodeContext, *inputs: Tensor) -> Tensor:
            return self.linear(inputs[0]).relu()  # type: ignore[no-any-return]

    layer = torch.nn.ModuleDict({"linear": Linear(4, 4)})
    assert check_node(Only, layer, [torch.randn(3, 4) for _ in range(2)], examples=3).done == tuple(Check)
