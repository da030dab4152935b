"""Run a cell plainly and through a schedule plan, and name everything that is not bit for bit the same."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper
from torch import Tensor

from layernodes.errors import UnsupportedLayerError
from tests.support.build import Microbatch, make_microbatches, make_model
from tests.support.configs import Cell, Order
from tests.support.deepep import emulated_backends

Status = Literal["right", "rounding", "wrong", "crash", "refused", "unrunnable"]
"""Bitwise equal; equal within rounding; not equal; raised; refused before it ran; the plain model itself raised."""

ContextFactory = Callable[[], AbstractContextManager[Any]]
Snapshot = Mapping[str, Tensor | None]


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What came of one cell: the worst status of its orders, and the first evidence for it."""

    name: str
    status: Status
    differing: tuple[str, ...] = ()
    detail: str = ""


_SEVERITY: Sequence[Status] = ("right", "unrunnable", "refused", "rounding", "wrong", "crash")


def worst(verdicts: Sequence[Verdict]) -> Verdict:
    """The verdict with the worst status."""
    return max(verdicts, key=lambda verdict: _SEVERITY.index(verdict.status))


def run_cell(cell: Cell, context_factory: ContextFactory, *, hooks: bool = False) -> Verdict:
    """Compare ``cell``'s plain model with the plan built and run under ``context_factory()``, in each of its orders.

    Needs an initialized process group with the cell's parallel sizes, and a CPU host (or a GPU). ``hooks`` also counts
    the calls of forward hooks on the decoder, its first layer and its final norm.
    """
    with emulated_backends():
        try:
            expected = run_plain(cell, hooks=hooks)
        except Exception as error:
            return Verdict(name=cell.name, status="unrunnable", detail=_one_line(error))
        return worst([_run_order(cell, order, context_factory, expected, hooks=hooks) for order in cell.orders])


def _run_order(
    cell: Cell, order: Order, context_factory: ContextFactory, expected: Snapshot, *, hooks: bool
) -> Verdict:
    try:
        with context_factory():
            actual = run_plan(cell, order, hooks=hooks)
    except UnsupportedLayerError as error:
        return Verdict(name=cell.name, status="refused", detail=f"{order}: {_one_line(error)}")
    except Exception as error:
        # A plan that failed half way leaves cycles that hold its tensors.
        gc.collect()
        return Verdict(name=cell.name, status="crash", detail=f"{order}: {_one_line(error)}")
    names = differing(expected, actual)
    if not names:
        return Verdict(name=cell.name, status="right")
    close = all(_close(expected.get(name), actual.get(name)) for name in names)
    return Verdict(name=cell.name, status="rounding" if close else "wrong", differing=tuple(names), detail=order)


def run_plain(cell: Cell, *, hooks: bool = False) -> Snapshot:
    """Forward and backward of each microbatch in turn through ``model(...)``."""
    model, microbatches = make_model(cell), make_microbatches(cell)
    outputs = []
    with _counted_hooks(model, enabled=hooks) as counts:
        for microbatch in microbatches:
            _set_input(model, microbatch)
            output = model(**microbatch.inputs)
            outputs.append(output.detach().clone())
            output.backward(microbatch.output_grad.to(output.dtype))
    return snapshot(model, microbatches, outputs, counts)


def run_plan(cell: Cell, order: Order, *, hooks: bool = False) -> Snapshot:
    """The same through ``model.build_schedule_plan(...)`` and its ``run``, in the given order."""
    model, microbatches = make_model(cell), make_microbatches(cell)
    with _counted_hooks(model, enabled=hooks) as counts:
        outputs = _ORDERS[order](model, microbatches)
    return snapshot(model, microbatches, outputs, counts)


def _run_serial(model: GPTModel, microbatches: Sequence[Microbatch]) -> list[Tensor]:
    outputs = []
    for microbatch in microbatches:
        plan = _build(model, microbatch)
        output = type(plan).run(plan, None)
        outputs.append(output.detach().clone())
        type(plan).run(None, plan, b_grad=microbatch.output_grad.to(output.dtype))
    return outputs


def _run_1f1b(model: GPTModel, microbatches: Sequence[Microbatch]) -> list[Tensor]:
    """F0, then F1 with B0, F2 with B1, ..., then the last B: ``combined_1f1b_schedule_for_no_pipelining``."""
    outputs: list[Tensor] = []
    backward, grad = None, None
    for microbatch in microbatches:
        forward = _build(model, microbatch)
        output = type(forward).run(forward, backward, b_grad=grad)
        outputs.append(output.detach().clone())
        backward, grad = forward, microbatch.output_grad.to(output.dtype)
    type(backward).run(None, backward, b_grad=grad)
    return outputs


_FORWARD_SLOTS = ("pre_dispatch_computation", "moe_dispatch", "mlp", "moe_combine", "mtp_post_process")


def _run_paired(model: GPTModel, microbatches: Sequence[Microbatch]) -> list[Tensor]:
    """All forwards slot by slot over the same layers, then all backwards slot by slot."""
    plans, values = [], []
    for microbatch in microbatches:
        plan = _build(model, microbatch)
        plan.record_current_stream()
        plans.append(plan)
        values.append(plan.pre_process.forward())
    for index in range(plans[0].num_layers()):
        for slot in _FORWARD_SLOTS:
            for i, plan in enumerate(plans):
                with plan.get_layer(index).get_low_precision_context():
                    values[i] = getattr(plan.get_layer(index), slot).forward(values[i])
    if plans[0].post_process is not None:
        values = [plan.post_process.forward(value) for plan, value in zip(plans, values, strict=True)]
    outputs = [value.detach().clone() for value in values]
    grads = [microbatch.output_grad.to(value.dtype) for microbatch, value in zip(microbatches, values, strict=True)]
    if plans[0].post_process is not None:
        grads = [plan.post_process.backward(grad) for plan, grad in zip(plans, grads, strict=True)]
    for index in reversed(range(plans[0].num_layers())):
        for slot in reversed(_FORWARD_SLOTS):
            for i, plan in enumerate(plans):
                grads[i] = getattr(plan.get_layer(index), slot).backward(grads[i])
        for plan in plans:
            plan.get_layer(index).mlp.backward_dw()
            plan.get_layer(index).pre_dispatch_computation.backward_dw()
    for plan, grad in zip(plans, grads, strict=True):
        plan.pre_process.backward(grad)
        plan.release_state()
    return outputs


_ORDERS: Mapping[Order, Callable[[GPTModel, Sequence[Microbatch]], list[Tensor]]] = {
    "serial": _run_serial,
    "1f1b": _run_1f1b,
    "paired": _run_paired,
}


def _build(model: GPTModel, microbatch: Microbatch) -> Any:
    _set_input(model, microbatch)
    return model.build_schedule_plan(**microbatch.inputs)


def _set_input(model: GPTModel, microbatch: Microbatch) -> None:
    if microbatch.hidden_states is not None:
        model.set_input_tensor(microbatch.hidden_states)


def snapshot(
    model: GPTModel, microbatches: Sequence[Microbatch], outputs: Sequence[Tensor], hook_counts: Mapping[str, int]
) -> Snapshot:
    """Everything a step leaves behind, by name; a gradient that does not exist is None."""
    state: dict[str, Tensor | None] = {f"output/{i}": output for i, output in enumerate(outputs)}
    for i, microbatch in enumerate(microbatches):
        if microbatch.hidden_states is not None:
            state[f"input_grad/{i}"] = microbatch.hidden_states.grad
    state |= {f"grad/{name}": parameter.grad for name, parameter in model.named_parameters()}
    state |= {f"parameter/{name}": parameter.detach() for name, parameter in model.named_parameters()}
    state |= {f"buffer/{name}": buffer for name, buffer in model.named_buffers()}
    state["rng/default"] = torch.get_rng_state()
    state |= {f"rng/{name}": value for name, value in get_cuda_rng_tracker().get_states().items()}
    for name, entry in get_moe_metrics_tracker().metrics.items():
        state[f"metric/{name}"] = entry.values.clone()
    for name, value in MTPLossLoggingHelper.tracker.items():
        if isinstance(value, Tensor):
            state[f"mtp_metric/{name}"] = value.clone()
    state |= {f"hooks/{name}": torch.tensor(count) for name, count in hook_counts.items()}
    return state


def differing(expected: Snapshot, actual: Snapshot) -> list[str]:
    """Names whose values are not bit for bit equal, in the order of ``expected``; a missing name differs."""
    names = [*expected, *(name for name in actual if name not in expected)]
    return [name for name in names if not _equal(expected, actual, name)]


def _equal(expected: Snapshot, actual: Snapshot, name: str) -> bool:
    if (name in expected) != (name in actual):
        return False
    a, b = expected[name], actual[name]
    if a is None or b is None:
        return a is b
    # Compared as bytes: equal NaNs are equal, zeros of different sign are not.
    same_form = a.dtype == b.dtype and a.shape == b.shape
    return same_form and torch.equal(
        a.contiguous().flatten().view(torch.uint8), b.contiguous().flatten().view(torch.uint8)
    )


def _close(a: Tensor | None, b: Tensor | None) -> bool:
    if a is None or b is None or a.shape != b.shape or not a.is_floating_point():
        return False
    return torch.allclose(a.float(), b.float(), rtol=1e-4, atol=1e-6)


@contextmanager
def _counted_hooks(model: GPTModel, *, enabled: bool) -> Iterator[Counter[str]]:
    """Count forward hooks on modules whose ``__call__`` the plain forward uses."""
    counts: Counter[str] = Counter()
    if not enabled:
        yield counts
        return
    modules = {
        "decoder": model.decoder,
        "decoder.layers.0": model.decoder.layers[0],
        "decoder.final_layernorm": model.decoder.final_layernorm,
    }
    handles = [
        module.register_forward_hook(lambda *_, name=name: counts.update([name]))
        for name, module in modules.items()
        if module is not None
    ]
    try:
        yield counts
    finally:
        for handle in handles:
            handle.remove()


def agree(verdict: Verdict) -> Verdict:
    """The worst verdict of all ranks of the default process group."""
    if dist.get_world_size() == 1:
        return verdict
    verdicts: list[Verdict | None] = [None] * dist.get_world_size()
    dist.all_gather_object(verdicts, verdict)
    return worst([one for one in verdicts if one is not None])


def _one_line(error: BaseException) -> str:
    text = f"{type(error).__name__}: {error}".splitlines()
    return text[0][:300]
