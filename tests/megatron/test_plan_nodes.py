"""Freeing under the proving node class: a permission is acted on only with proof (a wrong answer ends the process)."""

from __future__ import annotations

import textwrap

import pytest

from tests.support.launched import launched

_PRELUDE = """
import torch
from torch import nn

import layernodes
from layernodes import LayerPlan, ScheduleNode, Slot, StreamType
from tests.support.slots import SlotRun

weight = nn.Parameter(torch.randn(8, 8))


class Produce(ScheduleNode):
    slot = Slot.PRE_DISPATCH_COMPUTATION
    stream = StreamType.COMPUTE

    def forward(self, ctx, x):
        return x * 2.0


class Consume(ScheduleNode):
    slot = Slot.MLP
    stream = StreamType.COMPUTE

    def frees_input(self):
        return True


def run(produce, consume, plain):
    plan = LayerPlan.build(nn.Identity(), nodes={P: lambda _: produce(), M: lambda _: consume()})
    found = []
    for _ in range(3):
        slots = SlotRun(plan)
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(3), requires_grad=True)
        between = slots.nodes[P].forward(x)
        output = slots.nodes[M].forward(between)
        grad = torch.ones_like(output)
        outer = between if isinstance(between, tuple) else (between,)
        freed = [t.untyped_storage().nbytes() == 0 for t in outer]
        value = output.detach().clone()
        weight.grad = None
        input_grad = slots.backward(grad)
        own = weight.grad
        weight.grad = None
        expected = plain(x)
        expected.backward(grad)
        assert torch.equal(value, expected), "output"
        assert torch.equal(input_grad, x.grad), "input gradient"
        assert (own is None and weight.grad is None) or torch.equal(own, weight.grad), "weight gradient"
        found.append(freed)
    print(found[0] if found == found[:1] * 3 else found)


P, M = Slot.PRE_DISPATCH_COMPUTATION, Slot.MLP
"""

_CASES = {
    "one-linear-keeps": (
        "[False]",
        """
        class Linear(Consume):
            def forward(self, ctx, x):
                return x @ weight

        run(Produce, Linear, lambda x: (x * 2.0) @ weight)
        """,
    ),
    "cast-first-frees": (
        "[True]",
        """
        weight.data = weight.data.double()

        class Cast(Consume):
            def forward(self, ctx, x):
                return x.double() @ weight

        run(Produce, Cast, lambda x: (x * 2.0).double() @ weight)
        """,
    ),
    "returned-as-it-is-keeps": (
        "[False]",
        """
        class Identity(Consume):
            def forward(self, ctx, x):
                return x

        run(Produce, Identity, lambda x: x * 2.0)
        """,
    ),
    "a-view-returned-keeps": (
        "[False]",
        """
        class View(Consume):
            def forward(self, ctx, x):
                return x.view(8, 4)

        run(Produce, View, lambda x: (x * 2.0).view(8, 4))
        """,
    ),
    "two-outputs-of-one-storage-keep": (
        "[False, False]",
        """
        class Halves(Produce):
            def forward(self, ctx, x):
                return tuple((x * 2.0).chunk(2))

        class Sum(Consume):
            def forward(self, ctx, a, b):
                return a * 3.0 + b

        def plain(x):
            a, b = (x * 2.0).chunk(2)
            return a * 3.0 + b

        run(Halves, Sum, plain)
        """,
    ),
    "saved-by-its-producer-keeps": (
        "[False]",
        """
        class Exp(Produce):
            def forward(self, ctx, x):
                return x.exp()

        class Scale(Consume):
            def forward(self, ctx, x):
                return x * 3.0

        run(Exp, Scale, lambda x: x.exp() * 3.0)
        """,
    ),
    "kept-as-an-attribute-of-a-function": (
        "[False]",
        """
        class Square(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                ctx.x = x
                return x * x

            @staticmethod
            def backward(ctx, grad):
                return 2 * ctx.x * grad

        class Squared(Consume):
            def forward(self, ctx, x):
                return Square.apply(x)

        run(Produce, Squared, lambda x: Square.apply(x * 2.0))
        """,
    ),
    "left-where-another-slot-reads-it": (
        "[False]",
        """
        class Remember(Consume):
            seen = []

            def forward(self, ctx, x):
                self.seen.append(x)
                return x * 3.0

        run(Produce, Remember, lambda x: x * 2.0 * 3.0)
        assert all(t.abs().sum() > 0 for t in Remember.seen)
        """,
    ),
}


@pytest.fixture(scope="module")
def verdicts() -> dict[str, str]:
    """All cases in one process, one after the other, until one ends it; what each printed, by name."""
    script = [_PRELUDE, "host = layernodes.cpu_host()", "host.__enter__()"]
    for name, (_, code) in _CASES.items():
        script += [f"print('{name}:', end=' ', flush=True)", textwrap.dedent(code), "weight.data = weight.data.float()"]
    done = launched("-c", "\n".join(script))
    lines = dict(line.split(": ", 1) for line in done.stdout.splitlines())
    return {name: lines.get(name, f"not run, exit code {done.returncode}: {done.stderr[-800:]}") for name in _CASES}


@pytest.mark.parametrize("case", _CASES)
def test_freeing_on_proof(case: str, verdicts: dict[str, str]) -> None:
    """Outputs and gradients are right, and the input was freed where, and only where, nobody uses it."""
    assert verdicts[case] == _CASES[case][0]
