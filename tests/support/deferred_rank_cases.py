"""What each rank does in ``tests/plan/test_deferred_ranks.py``."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import layers as parallel_layers
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn import Module

from layernodes import schedules
from tests.support.collective_log import CollectiveLog
from tests.support.configs import by_name
from tests.support.deferred_runs import DeferredBench, random_deferred_schedule
from tests.support.idle_rank import expert_gradients
from tests.support.wgrads import gradients, held_bytes, logged, plain, plan_of, run
from tests.support.world import use_layout


def equal_plain(names: Sequence[str], num_random: int, streams: str = "threads") -> dict[str, list[str]]:
    """Deferred built-in and random schedules of cells against the oracle; what differs, by case."""
    found: dict[str, list[str]] = {}
    for number, name in enumerate(names):
        cell = by_name(name)
        use_layout(cell)
        bench = DeferredBench(cell)
        count = len(bench.microbatches)
        shape = bench.chunk().shape
        combined = schedules.combined_1f1b(shape, count)
        cases = {
            place: schedules.deferred(combined, shape, place) for place in ("next_comm", "end", "first_layer_last")
        }
        cases |= {f"random {i}": random_deferred_schedule(bench, 1000 * number + i) for i in range(num_random)}
        for case, schedule in cases.items():
            differing = bench.check(schedule, streams=streams)
            if differing:
                found[f"{name} {case}"] = differing[:5]
    return found


def empty_rank(names: Sequence[str]) -> dict[str, Any]:
    """No token for the last rank's experts: their deferred gradients are zeros."""
    found: dict[str, Any] = {}
    for name in names:
        cell = by_name(name)
        use_layout(cell)
        bench = DeferredBench(cell)
        shape = bench.chunk().shape
        schedule = schedules.deferred(schedules.combined_1f1b(shape, len(bench.microbatches)), shape, "end")
        found[name] = bench.check(schedule, streams="threads")
        log = CollectiveLog()
        bench.run(schedule, streams="threads", before_step=log.begin, after_step=log.end)
        found[f"{name} collectives"] = log.by_lane
        found[f"{name} gradients"] = expert_gradients(bench.model)
    return found


class _Linear(Module):
    def __init__(self, kind: str, *, sequence_parallel: bool, is_expert: bool, ep: int, bias: bool) -> None:
        super().__init__()
        config = TransformerConfig(
            num_layers=1,
            hidden_size=8,
            num_attention_heads=2,
            use_cpu_initialization=True,
            tensor_model_parallel_size=2,
            expert_model_parallel_size=ep,
            expert_tensor_parallel_size=1 if ep > 1 else 2,
            num_moe_experts=4,
            sequence_parallel=sequence_parallel,
            add_bias_linear=False,
        )
        options: dict[str, Any] = {
            "config": config,
            "init_method": torch.nn.init.normal_,
            "bias": bias,
            "skip_bias_add": is_expert,
            "is_expert": is_expert,
        }
        if kind == "column":
            self.linear: Any = ColumnParallelLinear(8, 6, gather_output=False, **options)
        else:
            self.linear = RowParallelLinear(8, 6, input_is_parallel=True, **options)
        if bias:
            torch.nn.init.normal_(self.linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        output, bias = self.linear(x)
        return output if bias is None else output + bias


def linears_and_held(expected: Mapping[str, int]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Every kind of parallel linear in one process group; ``expected`` bytes wait between B and W, by kind."""
    return _all_linears(), _held_between_b_and_w(expected)


def _all_linears() -> dict[str, Any]:
    """Every kind of parallel linear against its own autograd on two ranks, and where its products run."""
    found: dict[str, Any] = {}
    for ep in (1, 2):
        use_layout(by_name("tp2-ep2-etp1-alltoall" if ep == 2 else "tp2-ep1-etp2-alltoall"))
        found |= {f"ep={ep} {name}": value for name, value in _linears(ep).items()}
    return found


class _Sandwich(Module):
    """A parallel linear between two operations, so that its input and its output are the node's own."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.inner = _Linear(kind, sequence_parallel=True, is_expert=False, ep=1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x * 2) * 3


def _held_between_b_and_w(expected: Mapping[str, int]) -> dict[str, Any]:
    """Bytes that wait between B and W under sequence parallelism, and the gathers of each phase."""
    use_layout(by_name("tp2-ep1-etp2-alltoall"))
    return {kind: _held_of(kind, nbytes) for kind, nbytes in expected.items()}


def _held_since(before: int, expected: int) -> int:
    """Bytes held; gloo's thread may hold a collective's tensors for a moment after it has told us that it is done."""
    deadline = time.monotonic() + 5
    while (held := held_bytes() - before) != expected and time.monotonic() < deadline:
        time.sleep(0.01)
    return held


def _held_of(kind: str, expected: int) -> dict[str, Any]:
    torch.manual_seed(0)
    module = _Sandwich(kind)
    chunk = plan_of(module)
    (at,) = (index for index, place in enumerate(chunk.places) if place.node is not None)
    x = torch.randn(16, 4, module.inner.linear.weight.shape[1], requires_grad=True)
    gradient = torch.randn(module(x).shape)
    gathers: dict[str, list[tuple[int, ...]]] = {"F": [], "B": [], "W": []}
    own = parallel_layers.dist_all_gather_func
    phase = "F"

    def gather(output: Tensor, input: Tensor, **options: Any) -> Any:
        gathers[phase].append(tuple(input.shape))
        return own(output, input, **options)

    time.sleep(0.3)  # until gloo's thread has let go of what the call above gathered
    before = held_bytes()
    parallel_layers.dist_all_gather_func = gather
    try:
        chunk_run = chunk.open(x)
        chunk_run.forward(at, None)
        chunk_run.end_forward()
        phase = "B"
        chunk_run.begin_backward(gradient)
        chunk_run.output = None
        chunk_run.backward(at)
        chunk_run.end_backward()
        chunk_run.input_grad = None
        x.grad = None
        waiting = _held_since(before, expected)
        phase = "W"
        chunk_run.weight_gradients(at)
    finally:
        parallel_layers.dist_all_gather_func = own
    chunk_run.close()
    weight = module.inner.linear.weight
    left = _held_since(before + weight.grad.nbytes, 0)
    deferred, weight.grad = weight.grad, None
    module(x.detach()).backward(gradient)
    return {"waiting": waiting, "left": left, "gathers": gathers, "same": torch.equal(deferred, weight.grad)}


def _linears(ep: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for kind in ("column", "row"):
        for sequence_parallel in (False, True):
            for is_expert in (False, True):
                for bias in (False, True):
                    name = f"{kind} sp={sequence_parallel} expert={is_expert} bias={bias}"
                    options = {"sequence_parallel": sequence_parallel, "is_expert": is_expert, "ep": ep, "bias": bias}
                    torch.manual_seed(0)
                    ours, theirs = _Linear(kind, **options), _Linear(kind, **options)
                    theirs.load_state_dict(ours.state_dict())
                    torch.manual_seed(1 + dist.get_rank())
                    width = ours.linear.weight.shape[1]
                    batches = [torch.randn(4, 2, width, requires_grad=True) for _ in range(3)]
                    grads = [torch.randn(theirs(batches[0]).shape) for _ in range(3)]
                    expected = plain(theirs, batches, grads)
                    chunk = plan_of(ours)
                    order = schedules.deferred(schedules.combined_1f1b(chunk.shape, 3), chunk.shape, "end")
                    result = run(order, chunk, batches, loss_grads=grads)
                    same = all(
                        a is not None and b is not None and torch.equal(a, b)
                        for a, b in zip(
                            [*gradients(theirs).values(), *expected],
                            [*gradients(ours).values(), *result.input_grads],
                            strict=True,
                        )
                    )
                    log = logged(order, chunk, batches, loss_grads=grads)
                    found[name] = same, [len(log.products(phase)) for phase in ("F", "B", "W")]
    return found
