"""Forwards that go backward themselves: refused where a deferred weight is on the way, right where none is."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from layernodes import Slot
from layernodes.errors import NodeStateError, StepError
from layernodes.linear import deferring_products
from layernodes.stand_in import Site
from layernodes.wgrad import WgradStore
from tests.support.wgrads import Forward, Grid, ModuleNode, chunk_of, gradients, plain, plan_of, run

ONE = "F0.L0.mlp B0.L0.mlp W0.L0.mlp"


def _product(m: Any, x: Tensor) -> Tensor:
    return x @ m.w


def _einsum(m: Any, x: Tensor) -> Tensor:
    return torch.einsum("ti,io->to", x, m.w)


def _forces(product: Forward) -> Forward:
    def forward(m: Any, x: Tensor) -> Tensor:
        (force,) = torch.autograd.grad(product(m, x).tanh().sum(), x, create_graph=True)
        return x + force

    return forward


def _saliency(product: Forward) -> Forward:
    def forward(m: Any, x: Tensor) -> Tensor:
        y = product(m, x)
        (slope,) = torch.autograd.grad(y.tanh().sum(), x, retain_graph=True)
        return y * slope

    return forward


def _finished(product: Forward) -> Forward:
    """The inner graph is of its own, and over before the node's backward."""

    def forward(m: Any, x: Tensor) -> Tensor:
        own = x.detach().requires_grad_()
        product(m, own).tanh().sum().backward(inputs=[own])
        return x * own.grad

    return forward


def _learning(product: Forward) -> Forward:
    """Differentiates by the weight itself, as layers that train while they run."""

    def forward(m: Any, x: Tensor) -> Tensor:
        (slope,) = torch.autograd.grad(product(m, x).square().sum(), [m.w], create_graph=True, allow_unused=True)
        return x if slope is None else x @ (m.w - slope)

    return forward


INNER = {"forces": _forces, "saliency": _saliency, "finished": _finished, "learning": _learning}


def _input() -> Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(1)).requires_grad_()


@pytest.mark.parametrize("product", [_product, _einsum])
@pytest.mark.parametrize("name", INNER)
def test_an_inner_backward_through_a_deferred_weight_is_refused_by_name(name: str, product: Forward) -> None:
    """It would park a gradient that the plain layer has not, or miss the weight."""
    chunk = plan_of(Grid(torch.randn(4, 4)), forward=INNER[name](product))
    with pytest.raises(StepError, match=r"through Grid\.w .*leave the weight out of deferred_parameters\(\), or build"):
        run(ONE, chunk, [_input()])


@pytest.mark.parametrize("name", INNER)
def test_what_the_refusal_says_to_do_gives_the_plain_numbers(name: str) -> None:
    """The weight left out, or the plan built without deferral."""

    class Undeferred(ModuleNode):
        def deferred_parameters(self) -> tuple[torch.nn.Parameter, ...]:
            return ()

    forward = INNER[name](_product)
    weight = torch.randn(4, 4)
    theirs = Grid(weight.clone())
    expected = plain(lambda x: forward(theirs, x), [_input()])
    for kind, wgrad in ((Undeferred, "auto"), (ModuleNode, "off")):
        ours = Grid(weight.clone())
        chunk = chunk_of((ours, {Slot.MLP: lambda it, kind=kind: kind(it, forward)}), wgrad=wgrad)
        found = run("F0.L0.mlp B0.L0.mlp", chunk, [_input()])
        for a, b in zip((*expected, *gradients(theirs).values()), (*found.input_grads, ours.w.grad), strict=True):
            assert (a is None and b is None) or torch.equal(a, b)  # type: ignore[arg-type]


def test_an_inner_gradient_by_a_weight_that_is_in_no_product_yet_is_right() -> None:
    """Its stand-in is a leaf like any other."""

    def forward(m: Any, x: Tensor) -> Tensor:
        (slope,) = torch.autograd.grad(m.w.sigmoid().sum(), m.w)
        return x @ m.w + slope.sum(0)

    ours, theirs = Grid(torch.ones(4, 4)), Grid(torch.ones(4, 4))
    plain(lambda x: forward(theirs, x), [_input()])
    run(ONE, plan_of(ours, forward=forward), [_input()])
    assert torch.equal(ours.w.grad, theirs.w.grad)


@pytest.mark.parametrize("product", [_product, _einsum])
def test_a_second_backward_is_refused(product: Forward) -> None:
    """The gradient would be added twice."""
    module, store = Grid(torch.randn(4, 4)), WgradStore()
    with store.standing_in([Site(module, "w", module.w)]), deferring_products(store):
        y = product(module, _input()).sum()
    y.backward(retain_graph=True)
    with pytest.raises(NodeStateError, match="ran a second time"):
        y.backward()
    assert store.num_parked == 1
