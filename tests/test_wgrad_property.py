"""A user's own layers under random schedules: every gradient is the sum of plain ones in the order of their W or B."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import LayerNorm, Linear, Module, Parameter, Sequential, Tanh

from layernodes import Schedule, Slot
from tests import oracle
from tests.support.full import property_settings
from tests.support.strategies import plain as plain_shape
from tests.support.wgrads import CommNode, FirstNode, Grid, ModuleNode, StoreNode, chunk_of, run
from tests.test_wgrad import parked

_SLOTS = {Slot.PRE_DISPATCH_COMPUTATION: FirstNode, Slot.MOE_DISPATCH: CommNode, Slot.MLP: ModuleNode}
_SIZE = 4


class Experts(Module):
    """Rows go to one of three linears by their sign and size; some get none."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = torch.nn.ModuleList(Linear(_SIZE, _SIZE) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        """Rows in the order of their experts."""
        choice = (x.sum(-1) > 0).long() + (x.sum(-1) > 40).long()
        return torch.cat([expert(x[choice == i]) for i, expert in enumerate(self.experts)])


class Kind(NamedTuple):
    """A kind of node: makes its module, runs it, and what of it comes with W."""

    make: Callable[[], Any]
    run: Callable[[Any, Tensor], Tensor]
    deferred: tuple[str, ...]
    uses_store: bool = False


def _frozen() -> Module:
    module = Linear(_SIZE, _SIZE)
    module.weight.requires_grad_(False)
    return module


_KINDS = {
    "linear": Kind(lambda: Linear(_SIZE, _SIZE), lambda m, x: m(x), ("weight",)),
    "two": Kind(
        lambda: Sequential(Linear(_SIZE, 6), Tanh(), Linear(6, _SIZE, bias=False)),
        lambda m, x: m(x),
        ("0.weight", "2.weight"),
    ),
    "same twice": Kind(lambda: Linear(_SIZE, _SIZE), lambda m, x: m(m(x).tanh()), ("weight",)),
    "matmul": Kind(lambda: Grid(torch.randn(_SIZE, _SIZE)), lambda m, x: x @ m.w, ("w",)),
    "transposed": Kind(lambda: Grid(torch.randn(_SIZE, _SIZE)), lambda m, x: x @ m.w.t(), ("w",)),
    "einsum": Kind(
        lambda: Grid(torch.randn(_SIZE, _SIZE)), lambda m, x: torch.einsum("bi,oi->bo", x, m.w).tanh(), ("w",)
    ),
    "parked": Kind(lambda: Grid(torch.randn(_SIZE, _SIZE)), lambda m, x: x @ m.w, ("w",), uses_store=True),
    "beside": Kind(
        lambda: Linear(_SIZE, _SIZE), lambda m, x: F.linear(m(x) * m.weight.mean(0), m.weight, m.bias), ("weight",)
    ),
    "experts": Kind(Experts, lambda m, x: m(x), tuple(f"experts.{i}.weight" for i in range(3))),
    "norm": Kind(lambda: LayerNorm(_SIZE), lambda m, x: m(x), ()),
    "frozen": Kind(_frozen, lambda m, x: m(x), ()),
}


class Use(NamedTuple):
    """One node of the chunk."""

    layer: int
    slot: Slot
    kind: str
    module: Any


@st.composite
def uses(draw: st.DrawFn) -> list[Use]:
    """1 to 3 layers of 1 to 3 nodes; modules of one kind are sometimes tied."""
    torch.manual_seed(draw(st.integers(0, 999)))
    made: dict[str, Any] = {}
    found = []
    for layer in range(draw(st.integers(1, 3))):
        for slot in _SLOTS:
            kind = draw(st.sampled_from([None, *sorted(_KINDS)]))
            if kind is not None:
                if kind not in made or draw(st.booleans()):
                    made[kind] = _KINDS[kind].make()
                found.append(Use(layer, slot, kind, made[kind]))
    return found or [Use(0, Slot.MLP, "linear", Linear(_SIZE, _SIZE))]


def _node(use: Use) -> Callable[[Any], Any]:
    kind, base = _KINDS[use.kind], _SLOTS[use.slot]
    if kind.uses_store:
        both = type("Parking", (StoreNode, base), {})
        return lambda _: both(use.module, parked)  # type: ignore[no-any-return]
    return lambda _: base(use.module, kind.run)


@given(
    nodes=uses(),
    num_microbatches=st.integers(1, 4),
    streams=st.sampled_from(["inline", "threads"]),
    into_main_grad=st.booleans(),
    has_grads=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
@property_settings(60)
def test_gradients_add_in_the_order_of_w(
    nodes: list[Use], num_microbatches: int, streams: str, into_main_grad: bool, has_grads: bool, seed: int
) -> None:
    """Random nodes, ties, schedules with W at random legal places, up to 4 microbatches in flight; hooks fire once."""
    generator = torch.Generator().manual_seed(seed)
    batches = [torch.randn(5, _SIZE, generator=generator).requires_grad_() for _ in range(num_microbatches)]
    grads = [torch.randn(5, _SIZE, generator=generator) for _ in range(num_microbatches)]
    parameters: dict[Parameter, None] = {p: None for use in nodes for p in use.module.parameters() if p.requires_grad}
    alone, input_grads = _plain(nodes, list(parameters), batches, grads)

    before = {p: torch.randn(p.shape, generator=generator) for p in parameters} if has_grads else {}
    fired: dict[Parameter, int] = {}
    handles = []
    for p in parameters:
        p.grad = before[p].clone() if has_grads and not into_main_grad else None
        p.main_grad = before[p].clone() if has_grads else torch.zeros_like(p)  # type: ignore[attr-defined]

        def ready(p: Any) -> None:
            fired[p] = fired.get(p, 0) + 1
            if into_main_grad:
                p.main_grad.add_(p.grad)
                p.grad = None

        handles.append(p.register_post_accumulate_grad_hook(ready))
    layers = sorted({use.layer for use in nodes})
    chunk = chunk_of(*((Module(), {use.slot: _node(use) for use in nodes if use.layer == layer}) for layer in layers))
    texts = oracle.random_schedule(plain_shape(chunk.shape), num_microbatches, random.Random(seed))
    result = run(Schedule.parse("\n".join(texts)), chunk, batches, loss_grads=grads, streams=streams)
    for handle in handles:
        handle.remove()

    position = {text: i for i, text in enumerate(texts)}
    for p in parameters:
        ends = {m: _end(p, m, nodes, layers, position) for m in range(num_microbatches)}
        total = before.get(p, torch.zeros_like(p) if into_main_grad else None)
        for m in sorted(ends, key=ends.__getitem__):
            gradient = alone[m][p]
            if gradient is not None:
                total = gradient if total is None else total + gradient
        found = p.main_grad if into_main_grad else p.grad  # type: ignore[attr-defined]
        assert (found is None) is (total is None)
        assert found is None or torch.equal(found, total)
        assert fired.get(p, 0) == sum(alone[m][p] is not None for m in range(num_microbatches))
    for ours, theirs in zip(result.input_grads, input_grads, strict=True):
        assert torch.equal(ours, theirs)


def _plain(
    nodes: list[Use], parameters: list[Parameter], batches: list[Tensor], grads: list[Tensor]
) -> tuple[list[dict[Parameter, Tensor | None]], list[Tensor]]:
    alone: list[dict[Parameter, Tensor | None]] = []
    input_grads = []
    for batch, gradient in zip(batches, grads, strict=True):
        for p in parameters:
            p.grad = None
        x = start = batch.detach().requires_grad_()
        for use in nodes:
            x = _KINDS[use.kind].run(use.module, x)
        x.backward(gradient)
        alone.append({p: p.grad for p in parameters})
        assert start.grad is not None
        input_grads.append(start.grad)
    return alone, input_grads


def _end(p: Parameter, m: int, nodes: list[Use], layers: list[int], position: dict[str, int]) -> int:
    """When the microbatch's gradient of a parameter is complete: the last W, or B, of the nodes that use it."""
    return max(
        position[f"{'W' if name in _KINDS[use.kind].deferred else 'B'}{m}.L{layers.index(use.layer)}.{use.slot.value}"]
        for use in nodes
        for name, parameter in use.module.named_parameters()
        if parameter is p
    )
