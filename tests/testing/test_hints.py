"""``check_node`` notes what is legal and probably not meant, and nothing of the library's own nodes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Linear

from layernodes import CombineNode, DispatchNode, ExpertNode, NodeContext, PreDispatchNode, StreamType
from layernodes.testing import NodeCheckError, check_node
from layernodes.testing.bench import NodeBench
from layernodes.testing.hints import stream_notes
from tests.support import toy
from tests.support.build import make_model
from tests.support.configs import by_name
from tests.support.fixtures import MEGATRON_WORLD, megatron_world  # noqa: F401

pytestmark = MEGATRON_WORLD


def _toy_notes(node: Any, **options: Any) -> str:
    report = check_node(node, toy.toys(1), toy.inputs(2), nodes=toy.NODES, examples=1, **options)
    assert report.findings == ()
    assert all(f"\n  note: {note}" in str(report) for note in report.notes)
    return "\n".join(report.notes)


def _layer_notes(cell: str, make: Any) -> list[str]:
    """What is noted of the node that ``make`` makes of the cell's first layer; the rest of ``check_node`` left out."""
    model: Any = make_model(by_name(cell))
    batches = [(torch.randn(4, 1, 32), {}) for _ in range(2)]
    return stream_notes(NodeBench(model.decoder.layers[:1], {make.slot: make}, batches, None, "off"), make.slot)


class _Projects(toy.Send):
    """A matmul on the communication stream."""

    def __init__(self, layer: toy.Toy) -> None:
        super().__init__(layer)
        self.second = layer.second

    def forward(self, ctx: NodeContext, *inputs: Tensor) -> Tensor:
        return super().forward(ctx, self.second(inputs[0]))


class _Holds(toy.Send):
    """The whole layer, of which it uses no weight."""

    def __init__(self, layer: toy.Toy) -> None:
        super().__init__(layer)
        self.layer = layer


class _Exchanges(toy.Middle):
    """An exchange on the compute stream."""

    def forward(self, ctx: NodeContext, *inputs: Tensor) -> Tensor:
        sent = inputs[0].detach().contiguous()
        dist.all_to_all_single(torch.empty_like(sent), sent)
        return super().forward(ctx, *inputs)


class _Misspelt(toy.Middle):
    """A hook that nothing calls, a helper of its own, and a backward."""

    def touch_rng(self) -> bool:
        return False

    def forward_experts(self, x: Tensor) -> Tensor:
        return x

    def backward(self, gradient: Tensor) -> Tensor:
        return gradient


def test_a_method_that_is_no_hook() -> None:
    """What its name almost is; a helper that is called from forward is none of them."""
    hook, backward = _toy_notes(_Misspelt).splitlines()
    assert hook == "_Misspelt.touch_rng is no method of ScheduleNode, and no run calls it; did you mean touches_rng?"
    assert backward.startswith("_Misspelt.backward is no method of ScheduleNode")
    assert _toy_notes(toy.Middle) == ""


def test_a_product_on_the_communication_stream() -> None:
    """Named with what multiplies, and where it should go."""
    notes = _toy_notes(_Projects)
    assert "_Projects multiplies matrices on the communication stream (1 addmm in a forward)" in notes
    assert "a compute slot" in notes


def test_a_weight_that_is_held_and_not_used() -> None:
    assert _toy_notes(_Holds) == ""


def test_an_exchange_on_the_compute_stream() -> None:
    notes = _toy_notes(_Exchanges)
    assert "_Exchanges exchanges tokens on the compute stream (1 alltoall_base_ in a forward)" in notes
    assert "StreamType.COMM" in notes


@pytest.mark.parametrize("base", [CombineNode, DispatchNode])
def test_an_exchange_of_ours_put_on_the_compute_stream(base: type[Any]) -> None:
    moved = type("Moved", (base,), {"stream": StreamType.COMPUTE})
    (note,) = _layer_notes("latent-ep1", moved)
    assert f"Moved is a {base.__name__} and declares StreamType.COMPUTE" in note
    assert "leave 'stream' out" in note


def test_a_product_that_a_subclass_of_ours_adds() -> None:
    """``fc2_latent_proj``, which the base multiplies by there, is no news."""

    class Gated(CombineNode):
        def __init__(self, layer: Any) -> None:
            super().__init__(layer)
            self.gate = Linear(32, 32)

        def forward(self, ctx: NodeContext, *inputs: Tensor) -> Tensor:
            return self.gate(super().forward(ctx, *inputs))  # type: ignore[no-any-return]

    class Halved(CombineNode):
        def forward(self, ctx: NodeContext, *inputs: Tensor) -> Tensor:
            return super().forward(ctx, *inputs) * 0.5  # type: ignore[operator]

    (note,) = _layer_notes("latent-ep1", Gated)
    assert "Gated multiplies matrices on the communication stream (1 addmm in a forward)" in note
    assert _layer_notes("latent-ep1", Halved) == []


@pytest.mark.parametrize("node", [PreDispatchNode, DispatchNode, ExpertNode, CombineNode])
def test_nothing_of_the_librarys_own(node: Any) -> None:
    assert _layer_notes("latent-shared-ep1", node) == []


def test_a_note_stands_beside_a_finding() -> None:
    class Keeps(_Projects):
        """Two things at once."""

        def forward(self, ctx: NodeContext, *inputs: Tensor) -> Tensor:
            self.last = inputs[0]
            return super().forward(ctx, *inputs)

    with pytest.raises(NodeCheckError, match=r"(?s)a run changes Keeps.last.*\n  note: Keeps multiplies matrices"):
        check_node(Keeps, toy.toys(1), toy.inputs(2), nodes=toy.NODES, examples=1)
