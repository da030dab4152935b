"""Products with a deferred weight: same bits as plain autograd, the weight's product in W and nowhere else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from layernodes import schedules
from tests.support.wgrads import Grid, gradients, logged, plain, plan_of, run

Case = tuple[tuple[int, ...], Callable[[Any, Tensor], Tensor]]

FORMS: dict[str, Case] = {
    "F.linear": ((5, 4), lambda m, x: F.linear(x, m.w)),
    "F.linear-bias": ((5, 4), lambda m, x: F.linear(x, m.w, m.b)),
    "F.linear-keywords": ((5, 4), lambda m, x: F.linear(input=x, weight=m.w, bias=m.b)),
    "x @ w": ((4, 5), lambda m, x: x @ m.w),
    "x @ w.t()": ((5, 4), lambda m, x: x @ m.w.t()),
    "x @ w.T": ((5, 4), lambda m, x: x @ m.w.T),
    "x @ w.mT": ((5, 4), lambda m, x: x @ m.w.mT),
    "x @ w.transpose": ((5, 4), lambda m, x: x @ m.w.transpose(0, 1)),
    "F.linear-transposed": ((4, 5), lambda m, x: F.linear(x, m.w.t())),
    "matmul": ((4, 5), lambda m, x: torch.matmul(x, m.w)),
    "einsum": ((5, 4), lambda m, x: torch.einsum("...i,oi->...o", x, m.w)),
    "einsum-list": ((5, 4), lambda m, x: torch.einsum("...i,oi->...o", [x, m.w])),
    "w @ x": ((5, 4), lambda m, x: (m.w @ x.transpose(-1, -2)).transpose(-1, -2)),
}
FLAT: dict[str, Case] = {
    "mm": ((4, 5), lambda m, x: torch.mm(x, m.w)),
    "addmm": ((4, 5), lambda m, x: torch.addmm(m.b, x, m.w)),
    "addmm-t": ((5, 4), lambda m, x: torch.addmm(m.b, x, m.w.t())),
}
BATCHED: dict[str, Case] = {
    "bmm": ((3, 4, 5), lambda m, x: torch.bmm(x, m.w)),
    "batched matmul": ((3, 4, 5), lambda m, x: x @ m.w),
    "baddbmm": ((3, 4, 5), lambda m, x: torch.baddbmm(m.b, x, m.w)),
}
ALL = {**FORMS, **FLAT, **BATCHED}


def _module(shape: tuple[int, ...], seed: int, dtype: torch.dtype = torch.float32, layout: str = "plain") -> Grid:
    generator = torch.Generator().manual_seed(seed)
    w = torch.randn(shape, generator=generator).to(dtype)
    if layout == "transposed":
        w = w.transpose(-1, -2).contiguous().transpose(-1, -2)
    return Grid(torch.nn.Parameter(w), b=torch.nn.Parameter(torch.randn(5, generator=generator).to(dtype)))


def _input(rows: tuple[int, ...], seed: int, dtype: torch.dtype, layout: str, *, requires_grad: bool) -> Tensor:
    x = torch.randn((*rows, 4), generator=torch.Generator().manual_seed(seed)).to(dtype)
    if layout == "transposed":
        x = x.transpose(0, -1).contiguous().transpose(0, -1)
    elif layout == "strided":
        x = torch.stack([x, x], -1)[..., 0]
    return x.requires_grad_(requires_grad)


def _same(a: dict[str, Tensor | None], b: dict[str, Tensor | None]) -> bool:
    return a.keys() == b.keys() and all(
        x is y if x is None or y is None else torch.equal(x, y) for x, y in zip(a.values(), b.values(), strict=True)
    )


@given(
    name=st.sampled_from(sorted(ALL)),
    dims=st.integers(1, 4),
    sizes=st.lists(st.integers(0, 3), min_size=4, max_size=4),
    layouts=st.tuples(
        st.sampled_from(["plain", "transposed", "strided"]),
        st.sampled_from(["plain", "transposed"]),
        st.sampled_from(["plain", "transposed", "expanded"]),
    ),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
    requires_grad=st.booleans(),
    seed=st.integers(0, 99),
)
@settings(deadline=None)
def test_every_form_layout_and_dtype_equals_plain_autograd(
    name: str,
    dims: int,
    sizes: list[int],
    layouts: tuple[str, str, str],
    dtype: torch.dtype,
    requires_grad: bool,
    seed: int,
) -> None:
    """Output, input gradient and parameter gradients, two microbatches, empty ones included, any strides."""
    shape, forward = ALL[name]
    rows = (3, sizes[0]) if name in BATCHED else (sizes[0],) if name in FLAT else tuple(sizes[: dims - 1])
    if name == "w @ x" and not rows:
        rows = (2,)
    if name in BATCHED and name == "baddbmm" and dtype is torch.bfloat16:
        dtype = torch.float32
    layout = layouts[0] if rows else "plain"
    batches = [_input(rows, seed + i, dtype, layout, requires_grad=requires_grad) for i in range(2)]
    grads = [_gradient((*rows, 5), seed + i, dtype, layouts[2]) for i in range(2)]
    ours, theirs = _module(shape, seed, dtype, layouts[1]), _module(shape, seed, dtype, layouts[1])
    _check(ours, theirs, forward, batches, grads)


def _check(ours: Any, theirs: Any, forward: Any, batches: list[Tensor], grads: list[Tensor]) -> None:
    """Two microbatches, all weight gradients at the end, against plain autograd on a module of its own."""
    expected = plain(lambda x: forward(theirs, x), batches, grads)
    chunk = plan_of(ours, forward=forward)
    found = run(
        schedules.deferred(schedules.serial(chunk.shape, 2), chunk.shape, "end"), chunk, batches, loss_grads=grads
    )
    assert _same(gradients(theirs), gradients(ours))
    assert _same(dict(enumerate(expected)), dict(enumerate(found.input_grads)))  # type: ignore[arg-type]


def _gradient(shape: tuple[int, ...], seed: int, dtype: torch.dtype, layout: str) -> Tensor:
    gradient = torch.randn(shape, generator=torch.Generator().manual_seed(50 + seed)).to(dtype)
    if layout == "transposed" and len(shape) > 1:
        return gradient.transpose(0, -1).contiguous().transpose(0, -1)
    if layout == "expanded":
        return torch.ones((), dtype=dtype).expand(shape)
    return gradient


@pytest.mark.parametrize("name", ALL)
def test_the_weights_product_runs_in_w_and_the_inputs_in_b_once_each(name: str) -> None:
    """F: 1 product, B: 1, W: 1, each microbatch; together what plain autograd multiplies."""
    shape, forward = ALL[name]
    rows = (3, 7) if name in BATCHED else (7,)
    chunk = plan_of(_module(shape, 0), forward=forward)
    batches = [_input(rows, i, torch.float32, "plain", requires_grad=True) for i in range(2)]
    log = logged(schedules.deferred(schedules.serial(chunk.shape, 2), chunk.shape, "end"), chunk, batches)
    assert [len(log.products(phase)) for phase in ("F", "B", "W")] == [2, 2, 2]


def test_without_deferral_all_of_it_runs_in_b() -> None:
    """The same count where nothing is deferred: two products in B, none elsewhere."""
    shape, forward = FORMS["F.linear"]
    chunk = plan_of(_module(shape, 0), forward=forward, wgrad="off")
    log = logged("F0.L0.mlp B0.L0.mlp", chunk, [torch.randn(7, 4, requires_grad=True)])
    assert [len(log.products(phase)) for phase in ("F", "B", "W")] == [1, 2, 0]


def test_an_input_that_needs_no_gradient_costs_no_product_in_b() -> None:
    """Only the weight's, in W."""
    shape, forward = FORMS["F.linear-bias"]
    chunk = plan_of(_module(shape, 0), forward=forward)
    log = logged("F0.L0.mlp B0.L0.mlp W0.L0.mlp", chunk, [torch.randn(7, 4)])
    assert [len(log.products(phase)) for phase in ("F", "B", "W")] == [1, 0, 1]


@pytest.mark.parametrize("enabled", [True, False])
def test_autocast_equals_plain_autograd(enabled: bool) -> None:
    """Under autocast the casts take part in plain autograd; computed in B then, delivered in W."""
    ours, theirs = (torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Linear(6, 4)) for _ in range(2))
    theirs.load_state_dict(ours.state_dict())
    batches = [torch.randn(5, 4, requires_grad=True) for _ in range(3)]

    def twice(module: Any, x: Tensor) -> Tensor:
        return module(module(x)).float()

    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
        plain(lambda x: twice(theirs, x), batches)
        chunk = plan_of(ours, forward=twice)
        run(schedules.deferred(schedules.serial(chunk.shape, 3), chunk.shape, "end"), chunk, batches)
    assert _same(gradients(theirs), gradients(ours))


@pytest.mark.parametrize("name", ["F.linear-bias", "x @ w", "x @ w.t()", "einsum", "addmm", "bmm"])
def test_complex_products_equal_plain_autograd(name: str) -> None:
    """Their gradients are products of conjugates."""
    shape, forward = ALL[name]
    ours, theirs = (_module(shape, 0, torch.complex64) for _ in range(2))
    with torch.no_grad():
        for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
            b.copy_(a.mul_(1 + 2j))
    rows = (3, 7) if name in BATCHED else (7,)
    batches = [torch.randn((*rows, 4), dtype=torch.complex64, requires_grad=True) for _ in range(2)]
    grads = [torch.randn((*rows, 5), dtype=torch.complex64) for _ in range(2)]
    _check(ours, theirs, forward, batches, grads)
