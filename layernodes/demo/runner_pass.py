"""The second way through the nodes: a schedule of the user's choice under our own runner."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megatron.core.models.gpt import GPTModel

from layernodes.demo.compare import Pass, begin, end, output_gradient
from layernodes.demo.data import Microbatch
from layernodes.plan.chunk_plan import ChunkPlan
from layernodes.plan.runner import Runner, RunResult
from layernodes.plan.schedule import Schedule


def run_schedule(
    model: GPTModel, microbatches: Sequence[Microbatch], seed: int, chunk: ChunkPlan, schedule: Schedule, runner: Runner
) -> tuple[Pass, RunResult]:
    """Run every microbatch of the model under ``schedule``."""
    batches = [batch_of(microbatch) for microbatch in microbatches]
    gradients = [output_gradient(microbatch.labels, len(microbatches)) for microbatch in microbatches]
    start = begin(model, seed)
    result = runner.run(schedule, chunk, batches, gradients)
    return end(model, list(result.outputs), start), result


def batch_of(microbatch: Microbatch) -> dict[str, Any]:
    """A microbatch as ``ChunkPlan.open`` takes it."""
    return {
        "input_ids": microbatch.tokens,
        "position_ids": microbatch.positions,
        "attention_mask": None,
        "labels": microbatch.labels,
    }
