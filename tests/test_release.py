"""Freeing on proof: every way in which somebody else may still need a storage keeps it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from layernodes.autograd import leaf_of
from layernodes.release import is_sole_holder, may_release, num_storage_holders, num_tensor_holders, release_inputs


@pytest.fixture(params=[False, True], ids=["", "autocast"], autouse=True)
def is_autocast(request: pytest.FixtureRequest) -> Iterator[bool]:
    """Under autocast a leaf is a view of a tensor of its own."""
    _AUTOCAST.append(request.param)
    yield request.param
    _AUTOCAST.clear()


_AUTOCAST: list[bool] = []


def _cut(outer: Tensor) -> list[Tensor]:
    """A consumer's detached input, as a schedule node makes it, in the sequence that holds it."""
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=_AUTOCAST[0]):
        inner = leaf_of(outer)
    assert inner._is_view() is (_AUTOCAST[0] and outer.requires_grad and not outer.is_leaf)
    return [inner]


def release(outer: Tensor, inners: list[Tensor]) -> bool:
    """Release one input; tells whether it was emptied."""
    return release_inputs([outer], inners) == 1


def _produced(*, requires_grad: bool = True) -> Tensor:
    """An output of some producer that does not save it: multiplication by a number."""
    return torch.randn(3, 4, requires_grad=requires_grad) * 2.0


def test_counts_of_a_lone_tensor() -> None:
    """A tensor that nobody shares has one holder, and its storage one."""
    tensor = torch.zeros(3)
    assert num_storage_holders(tensor) == 1
    assert num_tensor_holders(tensor) == 1
    assert is_sole_holder(tensor)
    view = tensor[1:]
    assert num_storage_holders(tensor) == 2
    assert not is_sole_holder(tensor)
    assert not is_sole_holder(view)


def _sum(inner: Tensor) -> Tensor:
    return inner.sum()


_SAFE: dict[str, Callable[[Tensor], object]] = {
    "sum": _sum,  # saves the shape only
    "scaled": lambda inner: inner * 3.0,
    "cast": lambda inner: inner.double() @ torch.randn(4, 5, dtype=torch.float64, requires_grad=True),
    "indexed": lambda inner: inner[torch.tensor([2, 0, 1])],
    "unused": lambda inner: None,
}


@pytest.mark.parametrize("requires_grad", [True, False])
@pytest.mark.parametrize("name", _SAFE)
def test_frees_what_nobody_uses(name: str, requires_grad: bool) -> None:
    """A consumer that saves nothing of its input lets go of it, with and without a gradient."""
    outer = _produced(requires_grad=requires_grad)
    inner = _cut(outer)
    output = _SAFE[name](inner[0])
    assert release(outer, inner)
    assert outer.untyped_storage().nbytes() == 0
    assert inner[0].untyped_storage().nbytes() == 0
    if isinstance(output, Tensor) and output.requires_grad:
        output.sum().backward()
        assert (inner[0].grad is not None) is requires_grad


class _KeepsAsAttribute(torch.autograd.Function):
    """What many write in place of ``save_for_backward``: autograd does not know that it holds the input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.x = x
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 2 * ctx.x * grad


class _Saves(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 2 * x * grad


_WEIGHT = torch.randn(4, 5, requires_grad=True)
_KEEPING: dict[str, Callable[[Tensor], object]] = {
    "linear": lambda inner: inner @ _WEIGHT,
    "product": lambda inner: inner * inner,
    "view": lambda inner: inner.view(-1),
    "identity": lambda inner: inner,
    "chunk": lambda inner: inner.chunk(2),
    "detached": lambda inner: inner.detach(),
    "closure": lambda inner: lambda: inner.sum(),
    "remembered": lambda inner: {"latest": inner},
    "attribute": lambda inner: _KeepsAsAttribute.apply(inner),
    "saved": lambda inner: _Saves.apply(inner),
    "gelu": lambda inner: torch.nn.functional.gelu(inner),
}


@pytest.mark.parametrize("name", _KEEPING)
def test_keeps_what_the_consumer_uses(name: str) -> None:
    """An input that autograd saved, or that an output shares, is kept, and backward is right."""
    outer = _produced()
    inner = _cut(outer)
    value = outer.detach().clone()
    output = _KEEPING[name](inner[0])
    released = release(outer, inner)
    assert not released  # the tensors themselves must not be printed
    assert torch.equal(outer, value)
    del output


_KEEPING_WITHOUT_GRAD: dict[str, Callable[[Tensor], object]] = {
    "linear": lambda inner: inner @ _WEIGHT,  # saved for the weight's gradient
    "scaled": lambda inner: inner * _WEIGHT.sum(),
    "view": lambda inner: inner.view(-1),
    "identity": lambda inner: inner,
    "remembered": lambda inner: {"latest": inner},
}


@pytest.mark.parametrize("name", _KEEPING_WITHOUT_GRAD)
def test_keeps_what_the_consumer_uses_without_a_gradient(name: str) -> None:
    """So is an input that requires no grad: autograd saves it for others' gradients, and no node of it is counted."""
    outer = _produced(requires_grad=False)
    inner = _cut(outer)
    output = _KEEPING_WITHOUT_GRAD[name](inner[0])
    released = release(outer, inner)
    assert not released
    del output
    assert release(outer, inner)


def test_keeps_what_its_producer_saved() -> None:
    """An output that the producer's autograd saved is kept: exponentials, normalizations, activations."""
    for function in (torch.exp, torch.sigmoid, lambda x: torch.softmax(x, -1)):
        outer = function(torch.randn(3, 4, requires_grad=True))
        inner = _cut(outer)
        assert not release(outer, inner)


def test_keeps_what_its_producer_used_beside() -> None:
    """An output from which its slot made a handoff too is kept: autograd saved that very tensor, not a share of it."""
    scale = torch.ones((), requires_grad=True)
    outer = _produced()
    handoff = outer * scale
    inner = _cut(outer)
    assert num_storage_holders(outer) == 2 + inner[0]._is_view()
    released = release(outer, inner)
    assert not released  # the tensors themselves must not be printed
    handoff.sum().backward()
    assert torch.equal(scale.grad, outer.detach().sum())  # type: ignore[arg-type]


def test_keeps_what_another_tensor_shares() -> None:
    """Two outputs that share one storage are both kept: freeing one would empty the other (case 12)."""
    base = _produced()
    first, second = base[:1], base[1:]
    inner = _cut(first)
    assert not release(first, inner)
    del base
    other = _cut(second)
    assert not release(second, other)
    assert second.abs().sum() > 0


@pytest.mark.parametrize("requires_grad", [True, False])
@pytest.mark.parametrize(
    "see", [lambda base: base.view(2, 6), lambda base: base.t()[1:], lambda base: base.view(-1)[:5]]
)
def test_frees_a_view_that_is_all_of_its_base(see: Callable[[Tensor], Tensor], requires_grad: bool) -> None:
    """The base that its producer made and let go of is no user of its own."""
    outer = see(_produced(requires_grad=requires_grad))
    inner = _cut(outer)
    output = inner[0].sum()
    assert release(outer, inner)
    assert outer.untyped_storage().nbytes() == 0
    if requires_grad:
        output.backward()
        outer.backward(inner[0].grad)


def test_keeps_a_view_whose_base_is_used() -> None:
    """By Python, by the producer's autograd as an input or as an output, or by another view."""
    scale = torch.ones((), requires_grad=True)

    def of_python() -> tuple[Tensor, object]:
        base = _produced()
        return base.view(-1), base

    def of_an_operation() -> tuple[Tensor, object]:
        base = _produced()
        return base.view(-1), base * scale  # saves the very tensor

    def of_its_maker() -> tuple[Tensor, object]:
        return torch.exp(_produced()).view(-1), None

    def of_a_view() -> tuple[Tensor, object]:
        base = _produced()
        return base.view(-1), base[1:]

    for users in (of_python, of_an_operation, of_its_maker, of_a_view):
        outer, user = users()
        released = release(outer, _cut(outer))
        assert not released, users.__name__  # the tensors themselves must not be printed
        del user


def test_keeps_a_process_global_buffer() -> None:
    """A view of a buffer that somebody holds on to is kept."""
    buffer = torch.zeros(64)
    outer = buffer[:12].view(3, 4)
    assert not release(outer, _cut(outer))
    assert buffer.untyped_storage().nbytes() == 64 * 4


def test_keeps_an_input_that_somebody_refers_to() -> None:
    """A reference of Python to the input, which no counter of torch's shows, is one more user."""
    outer = _produced()
    inner = _cut(outer)
    reference = inner[0]
    assert may_release(outer, reference)
    released = release(outer, inner)
    assert not released
    del reference
    assert release(outer, inner)


def test_keeps_an_output_that_somebody_refers_to() -> None:
    """Where the sequence of outputs should be the only one that holds them; a lone one there is freed."""
    outers = [_produced()]
    inner = _cut(outers[0])
    reference = outers[0]
    assert release_inputs(outers, inner, owns_outers=True) == 0
    assert reference.untyped_storage().nbytes() > 0
    del reference
    assert release_inputs(outers, inner, owns_outers=True) == 1


def test_does_not_touch_tensors_with_storages_of_their_own() -> None:
    """An input that is a copy of the output (made viewless) frees nothing."""
    outer = _produced()
    assert not release(outer, [outer.clone()])
    assert outer.untyped_storage().nbytes() > 0
    shares = outer.detach()  # counted where the input would be
    released = release(outer, [outer.clone()])
    assert not released
    del shares


def test_keeps_a_second_input_with_the_same_storage() -> None:
    """One tensor handed to two inputs of a node is kept for both."""
    outer = _produced()
    first, second = _cut(outer), _cut(outer)
    assert release_inputs([outer, outer], [*first, *second]) == 0


def test_an_empty_tensor_is_no_trouble() -> None:
    """A rank that receives no token has inputs of no rows."""
    outer = torch.zeros(0, 4, requires_grad=True) * 1.0
    inner = _cut(outer)
    output = inner[0] * 2.0
    release(outer, inner)
    output.sum().backward()
    assert inner[0].grad is not None
