"""Megatron-Core's own linears, DDP and main gradients under deferral: same bits, hooks once and in W."""

from __future__ import annotations

import random
from collections import Counter
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn import Module

from layernodes import ChunkPlan, Schedule, schedules
from layernodes.errors import StepError
from tests import oracle
from tests.support.build import make_microbatches, make_model
from tests.support.configs import Cell, by_name
from tests.support.fixtures import MEGATRON_WORLD, megatron_world  # noqa: F401
from tests.support.strategies import plain as plain_shape
from tests.support.wgrads import fused_accumulation, gradients, logged, plain, plan_of, run

pytestmark = MEGATRON_WORLD


class Linear(Module):
    """One parallel linear, its bias added here where the linear leaves it to the caller."""

    def __init__(self, kind: str, *, dtype: torch.dtype = torch.float32, fuse: bool = False, **options: Any) -> None:
        super().__init__()
        config = TransformerConfig(
            num_layers=1,
            hidden_size=8,
            num_attention_heads=1,
            use_cpu_initialization=True,
            params_dtype=dtype,
            gradient_accumulation_fusion=fuse,
        )
        size = 6 if options.pop("square", False) else 4
        options = {"bias": True, "skip_bias_add": False, "init_method": torch.nn.init.normal_, **options}
        if kind == "column":
            self.linear: Any = ColumnParallelLinear(6, size, config=config, gather_output=False, **options)
        else:
            self.linear = RowParallelLinear(6, size, config=config, input_is_parallel=True, **options)
        if self.linear.bias is not None:
            torch.nn.init.normal_(self.linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        """The whole linear."""
        output, bias = self.linear(x)
        return output if bias is None else output + bias


def _pair(kind: str, **options: Any) -> tuple[Linear, Linear]:
    ours, theirs = Linear(kind, **options), Linear(kind, **options)
    theirs.load_state_dict(ours.state_dict())
    return ours, theirs


def _equal(a: dict[str, Tensor | None], b: dict[str, Tensor | None]) -> bool:
    return a.keys() == b.keys() and all(
        x is y if x is None or y is None else torch.equal(x, y) for x, y in zip(a.values(), b.values(), strict=True)
    )


@given(
    kind=st.sampled_from(["column", "row"]),
    bias=st.booleans(),
    skip_bias_add=st.booleans(),
    is_expert=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
    rows=st.sampled_from([(5,), (3, 2), (1, 4), (0,), (3, 1)]),
    strided=st.booleans(),
    expanded=st.booleans(),
    seed=st.integers(0, 99),
)
@settings(deadline=None, max_examples=60)
def test_parallel_linears_against_their_own_autograd(
    kind: str,
    bias: bool,
    skip_bias_add: bool,
    is_expert: bool,
    dtype: torch.dtype,
    rows: tuple[int, ...],
    strided: bool,
    expanded: bool,
    seed: int,
) -> None:
    """Bias, skip_bias_add, experts, dtypes, two and three dimensions, no rows, any strides."""
    torch.manual_seed(seed)
    ours, theirs = _pair(kind, bias=bias, skip_bias_add=skip_bias_add, is_expert=is_expert, dtype=dtype)
    batches = [torch.randn(*rows, 12 if strided else 6).to(dtype)[..., :6].requires_grad_() for _ in range(2)]
    grads = [torch.randn(1 if expanded else 4).to(dtype).expand(*rows, 4) for _ in range(2)]
    expected = plain(theirs, batches, grads)
    chunk = plan_of(ours)
    order = schedules.deferred(schedules.serial(chunk.shape, 2), chunk.shape, "end")
    found = run(order, chunk, batches, loss_grads=grads)
    assert _equal(gradients(theirs), gradients(ours))
    assert all(torch.equal(a, b) for a, b in zip(expected, found.input_grads, strict=True))  # type: ignore[arg-type]


@pytest.mark.parametrize("on_the_object", [False, True])
@pytest.mark.parametrize("kind", ["column", "row"])
def test_a_product_of_the_users_own_runs(kind: str, on_the_object: bool) -> None:
    """Of a subclass, or put on the linear itself, where it stays; its weight's gradient is delivered with W."""
    ours, theirs = _pair(kind)
    for module in (ours, theirs):
        own = module.linear._forward_impl

        def doubled(self: Any = None, own: Any = own, **arguments: Any) -> Tensor:
            product: Tensor = own(**arguments)
            return product * 2

        if on_the_object:
            module.linear._forward_impl = doubled
        else:
            module.linear.__class__ = type("Own", (type(module.linear),), {"_forward_impl": doubled})
    product = ours.linear._forward_impl
    batches = [torch.randn(5, 6, requires_grad=True)]
    expected = plain(theirs, batches)
    found = run("F0.L0.mlp B0.L0.mlp W0.L0.mlp", plan_of(ours), batches)
    assert _equal(gradients(theirs), gradients(ours))
    assert torch.equal(expected[0], found.input_grads[0])  # type: ignore[arg-type]
    assert ours.linear._forward_impl == product
    assert ("_forward_impl" in vars(ours.linear)) is on_the_object


@pytest.mark.parametrize("kind", ["column", "row"])
def test_a_frozen_weight_takes_megatrons_own_way(kind: str) -> None:
    """Nothing of it is deferred; the bias comes as there: not at all."""
    ours, theirs = _pair(kind)
    for module in (ours, theirs):
        module.linear.weight.requires_grad_(False)
    batches = [torch.randn(5, 6, requires_grad=True)]
    expected = plain(theirs, batches)
    found = run("F0.L0.mlp B0.L0.mlp", plan_of(ours), batches)
    assert _equal(gradients(theirs), gradients(ours))
    assert torch.equal(expected[0], found.input_grads[0])  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["column", "row"])
def test_frozen_after_the_build(kind: str) -> None:
    """The W step stays and does nothing."""
    ours, _ = _pair(kind)
    chunk = plan_of(ours)
    ours.linear.weight.requires_grad_(False)
    run("F0.L0.mlp B0.L0.mlp W0.L0.mlp", chunk, [torch.randn(5, 6, requires_grad=True)])
    assert ours.linear.weight.grad is None


@pytest.mark.parametrize("kind", ["column", "row"])
def test_products_of_a_parallel_linear(kind: str) -> None:
    """One each in F, B and W."""
    log = logged("F0.L0.mlp B0.L0.mlp W0.L0.mlp", plan_of(_pair(kind)[0]), [torch.randn(5, 3, 6, requires_grad=True)])
    assert [len(log.products(phase)) for phase in ("F", "B", "W")] == [1, 1, 1]


def _prepare_main_grads(module: Module, dtype: torch.dtype, *, marks: bool) -> list[str]:
    """What Megatron-Core's DDP sets up: main gradients, the mark, and a hook that moves gradients there."""
    fired: list[str] = []

    def move(parameter: Any, name: str) -> None:
        assert parameter.grad is not None
        if not parameter.grad_added_to_main_grad:
            parameter.main_grad.add_(parameter.grad)
        parameter.grad = None
        fired.append(name)

    for name, parameter in module.named_parameters():
        parameter.main_grad = torch.zeros_like(parameter, dtype=dtype)
        if marks:
            parameter.grad_added_to_main_grad = False
            parameter.register_post_accumulate_grad_hook(partial(move, name=name))
    return fired


@given(
    kinds=st.lists(st.sampled_from(["column", "row"]), min_size=1, max_size=3),
    num_microbatches=st.integers(1, 4),
    main_dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    zero_out=st.booleans(),
    marks=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
@settings(deadline=None, max_examples=60, suppress_health_check=list(HealthCheck))
def test_gradient_accumulation_fusion(
    kinds: list[str], num_microbatches: int, main_dtype: torch.dtype, zero_out: bool, marks: bool, seed: int
) -> None:
    """W adds to ``main_grad`` in the order of the Ws, then delivers Megatron-Core's dummy, so that hooks fire once."""
    with fused_accumulation() as calls:
        torch.manual_seed(seed % 1000)
        module = torch.nn.ModuleList(Linear(kind, fuse=True, bias=False, square=True) for kind in kinds)
        batches = [torch.randn(5, 6, requires_grad=True) for _ in range(num_microbatches)]
        alone: list[dict[str, Tensor]] = []
        for batch in batches:  # the plain model, one microbatch at a time
            _prepare_main_grads(module, main_dtype, marks=False)
            plain(torch.nn.Sequential(*module), [batch])
            alone.append({name: p.main_grad for name, p in module.named_parameters()})
        fired = _prepare_main_grads(module, main_dtype, marks=marks)
        for parameter in module.parameters():
            parameter.grad = None
            if zero_out:
                parameter.zero_out_wgrad = True
        chunk = plan_of(*module)
        texts = oracle.random_schedule(plain_shape(chunk.shape), num_microbatches, random.Random(seed))
        calls.clear()
        during: list[str] = []
        run(
            Schedule.parse(" ".join(texts)),
            chunk,
            batches,
            after_step=lambda step: during.extend([str(step)[0]] * (len(calls) - len(during))),
        )
    assert during == ["W"] * len(kinds) * num_microbatches
    for name, parameter in module.named_parameters():
        total = torch.zeros_like(parameter, dtype=main_dtype)
        place = f".L{name.split('.')[0]}.mlp"
        for step in texts:
            if step.startswith("W") and step.endswith(place):
                total.add_(alone[int(step[1 : step.index(".")])][name])
        assert torch.equal(parameter.main_grad, total)
        assert parameter.grad is None
    assert Counter(fired) == ({name: num_microbatches for name, _ in module.named_parameters()} if marks else {})


_DDP_CELLS = ["dense", "alltoall-shared-gate-ep1", "alltoall-mtp-ep1", "latent-shared-ep1", "tied-ep1", "mixed-ep1"]


def _wrap(cell: Cell, **options: Any) -> Any:
    model = make_model(cell)
    config = DistributedDataParallelConfig(overlap_grad_reduce=True, bucket_size=2000, **options)
    return DistributedDataParallel(model.config, config, model)


def _main_grads(model: Any) -> dict[str, Tensor]:
    return {name: p.main_grad.clone() for name, p in model.module.named_parameters() if p.requires_grad}


def _plain_ddp(cell: Cell, steps: int) -> list[dict[str, Tensor]]:
    """The plain model under DDP, microbatch after microbatch, all but the last without reduction."""
    model, microbatches = _wrap(cell), make_microbatches(cell)
    found = []
    for _ in range(steps):
        model.zero_grad_buffer()
        for i, microbatch in enumerate(microbatches):
            if i < len(microbatches) - 1:
                with model.no_sync():
                    model(**microbatch.inputs).backward(microbatch.output_grad)
            else:
                model(**microbatch.inputs).backward(microbatch.output_grad)
        model.finish_grad_sync()
        found.append(_main_grads(model))
    return found


@pytest.mark.parametrize("name", _DDP_CELLS)
@pytest.mark.parametrize("place", ["after_b", "next_comm", "end", "first_layer_last"])
def test_megatrons_ddp_with_overlapped_reduction(name: str, place: str) -> None:
    """Three steps: main gradients as in the plain model, each parameter ready once, and each bucket reduced at once
    when its last parameter is ready, with all of its gradients there."""
    cell = by_name(name)
    expected = _plain_ddp(cell, 3)
    model, microbatches = _wrap(cell), make_microbatches(cell)
    chunk = ChunkPlan.build(model, wgrad="auto")
    order = schedules.deferred(schedules.combined_1f1b(chunk.shape, len(microbatches)), chunk.shape, place)
    # The last B or W of each slot: what it adds completes the gradients of the slot's parameters.
    last = {(step.phase, step.layer, step.slot): step for step in order}
    groups = [*model.bucket_groups, *model.expert_parallel_bucket_groups]
    now: list[str] = []
    reduced: list[str] = []
    for group in groups:
        start = group.start_grad_sync
        group.start_grad_sync = lambda *a, start=start, **k: (reduced.append(now[-1]), start(*a, **k))[1]
    deferred = {
        id(parameter)
        for plan in chunk.layers
        for node in plan.describe().nodes
        for key, parameter in plan.layer.named_parameters()
        if key in node.wgrad
    }
    fired: Counter[str] = Counter()
    for key, parameter in model.module.named_parameters():

        def ready(p: Any, key: str = key, is_deferred: bool = id(parameter) in deferred) -> None:
            assert p.grad is not None
            assert now[-1].startswith("W" if is_deferred else "B"), (key, now[-1])
            fired[key] += 1

        parameter.register_post_accumulate_grad_hook(ready)

    def mark(step: Any) -> None:
        now.append(str(step))
        for group in groups:
            group.is_last_microbatch = last[step.phase, step.layer, step.slot] == step

    for turn in range(3):
        model.zero_grad_buffer()
        fired.clear()
        reduced.clear()
        now[:] = ["start"]
        run(
            order,
            chunk,
            [dict(m.inputs) for m in microbatches],
            loss_grads=[m.output_grad for m in microbatches],
            before_step=mark,
        )
        now.append("finish")
        model.finish_grad_sync()
        found = _main_grads(model)
        assert all(torch.equal(expected[turn][key], found[key]) for key in found)
        assert set(fired.values()) == {len(microbatches)}
        if turn:  # the first step is where DDP learns how often each parameter is ready
            assert len(reduced) == len(groups)
            assert "finish" not in reduced


@pytest.mark.parametrize("kind", ["column", "row"])
def test_an_inner_backward_through_a_parallel_linear_is_refused_by_name(kind: str) -> None:
    """It would park a gradient that the plain layer has not."""

    def forces(m: Linear, x: Tensor) -> Tensor:
        (force,) = torch.autograd.grad(m(x).tanh().sum(), x)
        return x + force

    chunk = plan_of(Linear(kind), forward=forces)
    with pytest.raises(StepError, match=r"ParallelLinear\.weight .*leave the weight out of deferred_parameters\(\)"):
        run("F0.L0.mlp B0.L0.mlp W0.L0.mlp", chunk, [torch.randn(5, 6, requires_grad=True)])
