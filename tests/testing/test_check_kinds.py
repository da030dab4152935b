"""``check_node`` where tensors hold NaN, gradients are sparse, and inputs complex."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import Embedding, Linear, Module

from layernodes import NodeContext, ScheduleNode, Slot, StreamType
from layernodes.testing import NodeCheckError, check_node


class _Whole(ScheduleNode):
    """The layer as it is."""

    slot = Slot.MLP
    stream = StreamType.COMPUTE

    def __init__(self, layer: Module) -> None:
        self.layer = layer

    def forward(self, ctx: NodeContext, *inputs: Tensor) -> Tensor:
        return self.layer(inputs[0])  # type: ignore[no-any-return]


def test_nan_equals_nan() -> None:
    class Roots(Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).sqrt()

    class Others(_Whole):
        def forward(self, ctx: NodeContext, *inputs: Tensor) -> Tensor:
            return -super().forward(ctx, *inputs)

    batches = [torch.randn(9, 4) for _ in range(2)]
    assert check_node(_Whole, Roots(4, 4), batches, plain=Roots.forward, examples=2).findings == ()
    with pytest.raises(NodeCheckError, match="output of microbatch 0 \\(is wrong\\)"):
        check_node(Others, Roots(4, 4), batches, plain=Roots.forward, examples=2)


def test_sparse_gradients() -> None:
    class Looks(Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = Embedding(5, 4, sparse=True)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.table(x.detach().argmax(-1))  # type: ignore[no-any-return]

    class Loses(_Whole):
        def forward(self, ctx: NodeContext, *inputs: Tensor) -> Tensor:
            return super().forward(ctx, *inputs) * 2.0

    batches = [torch.randn(9, 4) for _ in range(2)]
    assert check_node(_Whole, Looks(), batches, plain=Looks.forward, examples=2).findings == ()
    with pytest.raises(NodeCheckError, match="gradient of layer 0's table.weight \\(is wrong\\)"):
        check_node(Loses, Looks(), batches, plain=Looks.forward, examples=2)


def test_lost_gradient_of_a_complex_input() -> None:
    class Parts(Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(torch.view_as_real(x).flatten(-2))

    class Cuts(_Whole):
        def forward(self, ctx: NodeContext, *inputs: Tensor) -> Tensor:
            return super().forward(ctx, inputs[0].detach())

    batches = [torch.randn(5, 4, dtype=torch.complex64) for _ in range(2)]
    assert check_node(_Whole, Parts(8, 4), batches, plain=Parts.forward, examples=2).findings == ()
    with pytest.raises(NodeCheckError, match="input gradient of microbatch 0 \\(is missing\\)"):
        check_node(Cuts, Parts(8, 4), batches, plain=Parts.forward, examples=2)
