"""Run a cell through a chunk plan and a runner, and compare with an oracle that knows the schedule as text.

The oracle runs the plain model microbatch after microbatch from no gradients, keeps each one's gradients, and adds them
in the order in which the schedule runs the B of the step that owns the parameter (``tests.support.owners``).
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper
from torch import Tensor

from layernodes import ChunkPlan, Runner, RunResult, Schedule
from tests import oracle
from tests.support.build import Microbatch, make_microbatches, make_model, moved, reset_globals
from tests.support.compare import Snapshot, differing
from tests.support.configs import Cell
from tests.support.owners import hybrid_groups, hybrid_owner, owner
from tests.support.strategies import plain


@dataclass(kw_only=True)
class Plain:
    """What the plain model does with each microbatch on its own."""

    outputs: list[Tensor] = field(default_factory=list)
    input_grads: list[Tensor | None] = field(default_factory=list)
    grads: list[dict[str, Tensor | None]] = field(default_factory=list)
    metrics: list[dict[str, Tensor]] = field(default_factory=list)
    final: dict[str, Tensor] = field(default_factory=dict)


class Bench:
    """One cell with its model, microbatches and plain results; runs any number of schedules from the same state.

    ``group`` is that of ``ChunkPlan.build``, for cells with a layer pattern.
    """

    wgrad = "off"

    def __init__(self, cell: Cell, *, group: bool | str | None = None, device: str = "cpu") -> None:
        self.cell = cell
        self.group = group
        self.model: Any = make_model(cell).to(device)
        self.microbatches: list[Microbatch] = [moved(one, device) for one in make_microbatches(cell)]
        self._has_cuda = torch.device(device).type == "cuda"
        self._buffers = {name: buffer.clone() for name, buffer in self.model.named_buffers()}
        self._rng = torch.get_rng_state()
        self._cuda_rng = torch.cuda.get_rng_state() if self._has_cuda else None
        self._tracker = get_cuda_rng_tracker().get_states()
        self._chunks: dict[bool, ChunkPlan] = {}
        self.plain = self._run_plain()

    def chunk(self, *, split_combine: bool = False) -> ChunkPlan:
        """The chunk plan, built once."""
        if split_combine not in self._chunks:
            self._chunks[split_combine] = ChunkPlan.build(
                self.model, split_combine=split_combine, wgrad=self.wgrad, group=self.group
            )
        return self._chunks[split_combine]

    def place(self, name: str, *, split_combine: bool = False) -> str:
        """The place whose B delivers a parameter's gradient, by hand."""
        if self.cell.pattern:
            return hybrid_owner(self.cell, name, self.group, split_combine=split_combine)
        return owner(self.cell, self.model, name, split_combine=split_combine)

    def batches(self) -> list[dict[str, Any]]:
        """The microbatches as the runner takes them."""
        return [
            dict(m.inputs)
            if m.hidden_states is None
            else {**m.inputs, "hidden_states": m.hidden_states.detach()}
            if not m.hidden_states.requires_grad
            else {**m.inputs, "hidden_states": m.hidden_states}
            for m in self.microbatches
        ]

    def loss_grads(self) -> list[Tensor]:
        """The gradient of each microbatch's output."""
        return [m.output_grad.to(o.dtype) for m, o in zip(self.microbatches, self.plain.outputs, strict=True)]

    def reset(self) -> None:
        """Generators, trackers, buffers and gradients as they were when the model was made."""
        reset_globals(self.cell.seed)
        torch.set_rng_state(self._rng)
        if self._cuda_rng is not None:
            torch.cuda.set_rng_state(self._cuda_rng)
        get_cuda_rng_tracker().set_states(dict(self._tracker))
        for name, buffer in self.model.named_buffers():
            buffer.data.copy_(self._buffers[name])
        for module in self.model.modules():
            for name in ("global_tokens_per_expert", "ga_steps"):
                if name in module.__dict__:
                    module.__dict__[name] = None
        self.clear_grads()

    def clear_grads(self) -> None:
        """No gradient anywhere."""
        for parameter in self.model.parameters():
            parameter.grad = None
        for microbatch in self.microbatches:
            if microbatch.hidden_states is not None:
                microbatch.hidden_states.grad = None

    def run(
        self,
        schedule: Schedule,
        *,
        streams: Any = "inline",
        rng: str = "plain",
        split_combine: bool = False,
        chunk: ChunkPlan | None = None,
        grads_before: Mapping[str, Tensor] | None = None,
        **runner_options: Any,
    ) -> Snapshot:
        """Run the schedule from the fresh state and take down everything that it leaves behind."""
        self.reset()
        for name, parameter in self.model.named_parameters():
            if grads_before and name in grads_before:
                parameter.grad = grads_before[name].clone()
        chunk = chunk or self.chunk(split_combine=split_combine)
        with Runner(streams=streams, rng=rng, **runner_options) as runner:
            result = runner.run(schedule, chunk, self.batches(), self.loss_grads())
        return self.snapshot(result)

    def snapshot(self, result: RunResult) -> Snapshot:
        """What a run left behind, by name."""
        state: dict[str, Tensor | None] = {f"output/{i}": output for i, output in enumerate(result.outputs)}
        state |= {f"input_grad/{i}": grad for i, grad in enumerate(result.input_grads)}
        state |= {f"grad/{name}": _copy(parameter.grad) for name, parameter in self.model.named_parameters()}
        return {**state, **self._global_state(), **{f"metric/{k}": v for k, v in _metrics().items()}}

    def expected(
        self, schedule: Schedule, *, split_combine: bool = False, grads_before: Mapping[str, Tensor] | None = None
    ) -> Snapshot:
        """What the oracle expects of the schedule."""
        steps = [str(step) for step in schedule]
        count = len(self.microbatches)
        state: dict[str, Tensor | None] = {f"output/{i}": output for i, output in enumerate(self.plain.outputs)}
        state |= {f"input_grad/{i}": grad for i, grad in enumerate(self.plain.input_grads)}
        for name, _ in self.model.named_parameters():
            place = self.place(name, split_combine=split_combine)
            total = (grads_before or {}).get(name)
            for m in _order(steps, "B", place, count):
                gradient = self.plain.grads[m][name]
                if gradient is not None:
                    total = gradient if total is None else total + gradient
            state[f"grad/{name}"] = total
        state |= self.plain.final
        names = [name for metrics in self.plain.metrics for name in metrics]
        for name in names:
            state[f"metric/{name}"] = self._metric(name, steps)
        return state

    def check(
        self,
        schedule: Schedule,
        *,
        split_combine: bool = False,
        grads_before: Mapping[str, Tensor] | None = None,
        **options: Any,
    ) -> list[str]:
        """Names of everything that is not bit for bit what the oracle expects."""
        expected = self.expected(schedule, split_combine=split_combine, grads_before=grads_before)
        actual = self.run(schedule, split_combine=split_combine, grads_before=grads_before, **options)
        return [name for name in differing(expected, actual) if not self._rounds(name, expected, actual)]

    def _rounds(self, name: str, expected: Snapshot, actual: Snapshot) -> bool:
        """Whether a tracker adds several layers' losses of several microbatches in one place, in whatever order."""
        if not (self.cell.config.get("mtp_use_repeated_layer") and name.startswith("metric/")):
            return False
        a, b = expected.get(name), actual.get(name)
        return a is not None and b is not None and torch.allclose(a, b)

    def _metric(self, name: str, steps: Sequence[str]) -> Tensor:
        """Trackers add, layer by layer, in the order in which the schedule goes forward there."""
        parts = [metrics[name] for metrics in self.plain.metrics]
        total = torch.zeros_like(parts[0])
        for index in range(total.numel()):
            if name.startswith("mtp"):
                place = "post_process"
            else:
                place = f"L{self._layer(index)}.pre_dispatch_computation"
            if f"F0.{place}" not in steps:
                place = steps[0].partition(".")[2]
            for m in _order(steps, "F", place, len(parts)):
                total.view(-1)[index] += parts[m].view(-1)[index]
        return total

    def _layer(self, index: int) -> int | None:
        """The number in schedules of the decoder layer whose router reports at ``index``; None: no router does."""
        if not self.cell.pattern:
            return index
        has_router = self.cell.pattern[index : index + 1] == "E"
        return hybrid_groups(self.cell, self.group)[index] if has_router else None

    def _run_plain(self) -> Plain:
        plain = Plain()
        for microbatch in self.microbatches:
            self.clear_grads()
            get_moe_metrics_tracker().metrics.clear()
            MTPLossLoggingHelper.tracker.clear()
            if microbatch.hidden_states is not None:
                self.model.set_input_tensor(microbatch.hidden_states)
            output = self.model(**microbatch.inputs)
            plain.outputs.append(output.detach().clone())
            if output.requires_grad:
                output.backward(microbatch.output_grad.to(output.dtype))
            hidden = microbatch.hidden_states
            plain.input_grads.append(None if hidden is None else _copy(hidden.grad))
            plain.grads.append({name: _copy(p.grad) for name, p in self.model.named_parameters()})
            plain.metrics.append(_metrics())
        plain.final = self._global_state()
        self.clear_grads()
        return plain

    def _global_state(self) -> dict[str, Tensor]:
        state = {f"buffer/{name}": buffer.clone() for name, buffer in self.model.named_buffers()}
        state |= {f"parameter/{name}": p.detach().clone() for name, p in self.model.named_parameters()}
        state["rng/default"] = torch.get_rng_state()
        state |= {f"rng/{name}": value.clone() for name, value in get_cuda_rng_tracker().get_states().items()}
        return state


def _order(steps: Sequence[str], phase: str, place: str, count: int) -> list[int]:
    texts = {f"{phase}{m}.{place}": m for m in range(count)}
    order = [texts[step] for step in steps if step in texts]
    assert len(order) == count, f"{phase} of {place} stands {len(order)} times in the schedule"
    return order


def _metrics() -> dict[str, Tensor]:
    found = {name: entry.values.clone() for name, entry in get_moe_metrics_tracker().metrics.items()}
    for name, value in MTPLossLoggingHelper.tracker.items():
        if isinstance(value, Tensor):
            found[f"mtp {name}"] = value.clone()
    return found


def _copy(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.detach().clone()


def random_schedule(bench: Bench, seed: int, *, split_combine: bool = False, mode: str = "train") -> Schedule:
    """A valid schedule of the bench's chunk, drawn by the hand-written oracle."""
    shape = bench.chunk(split_combine=split_combine).shape
    texts = oracle.random_schedule(plain(shape), len(bench.microbatches), random.Random(seed), mode)
    return Schedule.parse("\n".join(texts))


def check_random_schedules(cell: Cell, count: int, *, streams: str, device: str = "cpu") -> dict[str, list[str]]:
    """What is not the oracle's after each of ``count`` random schedules, by the schedule's text."""
    bench = Bench(cell, device=device)
    wrong = {}
    for seed in range(count):
        schedule = random_schedule(bench, seed)
        names = bench.check(schedule, streams=streams)
        if names:
            wrong[str(schedule)] = names
    return wrong


def check_example(
    cell: Cell,
    *,
    seed: int,
    streams: str,
    split_combine: bool,
    has_grads: bool,
    group: bool | str | None = None,
) -> None:
    """One example of the property; an AssertionError says what differs."""
    bench = Bench(cell, group=group)
    schedule = random_schedule(bench, seed, split_combine=split_combine)
    before = None
    if has_grads:
        generator = torch.Generator().manual_seed(seed)
        before = {
            name: torch.randn(p.shape, generator=generator).to(p.device, p.dtype)
            for name, p in bench.model.named_parameters()
            if p.requires_grad
        }
    for _ in range(2):  # the second time through the same plan, whose state must not tell
        names = bench.check(schedule, streams=streams, split_combine=split_combine, grads_before=before)
        assert not names, (names[:5], str(schedule))
