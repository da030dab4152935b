"""What each rank does in ``tests/plan/test_runner_ranks.py``."""

from __future__ import annotations

import hashlib
import os
import random
import signal
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from layernodes import (
    ChunkPlan,
    RankMismatchError,
    Runner,
    Schedule,
    ScheduleError,
    Step,
    StepError,
    schedules,
)
from tests.support.collective_log import CollectiveLog
from tests.support.compare import differing
from tests.support.configs import Cell, by_name
from tests.support.idle_rank import expert_gradients
from tests.support.runs import Bench, random_schedule
from tests.support.world import use_layout


def equal_plain(names: Sequence[str], num_random: int) -> dict[str, list[str]]:
    """Built-in and random schedules of cells against the oracle, with random delays; what differs, by case."""
    found: dict[str, list[str]] = {}
    for number, name in enumerate(names):
        cell = by_name(name)
        use_layout(cell)
        bench = Bench(cell)
        count = len(bench.microbatches)
        for split_combine in (False, True):
            shape = bench.chunk(split_combine=split_combine).shape
            cases = {
                "combined_1f1b": schedules.combined_1f1b(shape, count),
                "forward_forward": schedules.forward_forward(shape, count),
            }
            if not split_combine:
                cases |= {
                    f"random {i}": random_schedule(bench, 1000 * number + i, split_combine=split_combine)
                    for i in range(num_random)
                }
            for case, schedule in cases.items():
                delay = random.Random(f"{dist.get_rank()} {name} {case}")

                def wait(_: Step, delay: random.Random = delay) -> None:
                    if delay.random() < 0.2:
                        time.sleep(delay.random() * 0.004)

                differing = bench.check(schedule, split_combine=split_combine, streams="threads", before_step=wait)
                if differing:
                    found[f"{name} {case} split={split_combine}"] = differing[:5]
    return found


def finishing_order(name: str) -> list[tuple[str, str]]:
    """The steps of each lane in the order in which they finished, whatever the delays."""
    cell = by_name(name)
    use_layout(cell)
    bench = Bench(cell)
    schedule = schedules.combined_1f1b(bench.chunk().shape, len(bench.microbatches))
    delay = random.Random(dist.get_rank())
    done: list[tuple[str, str]] = []
    bench.run(
        schedule,
        streams="threads",
        before_step=lambda step: time.sleep(delay.random() * 0.003),
        after_step=lambda step: done.append((threading.current_thread().name, str(step))),
    )
    return done


def mismatches(name: str) -> dict[str, Any]:
    """Different schedules on the two ranks, in several ways, and a right run on the same chunk afterwards."""
    cell = by_name(name)
    use_layout(cell)
    bench = Bench(cell)
    rank = dist.get_rank()
    chunk = bench.chunk()
    count = len(bench.microbatches)
    serial, other = schedules.serial(chunk.shape, count), schedules.combined_1f1b(chunk.shape, count)
    swapped = Schedule([*_exchanged(schedules.forward_forward(chunk.shape, count))])
    invalid = Schedule(serial.steps[:-1])
    seen: dict[str, Any] = {}
    with Runner(streams="threads") as runner:

        def attempt(case: str, schedule: Schedule, num: int = count) -> None:
            bench.reset()
            began = time.monotonic()
            try:
                runner.run(schedule, chunk, bench.batches()[:num], bench.loss_grads()[:num])
                seen[case] = "ran"
            except Exception as error:
                seen[case] = (type(error).__name__, str(error), time.monotonic() - began)

        for streams_round in range(2):
            attempt(f"other {streams_round}", serial if rank else other)
            attempt(f"same {streams_round}", other)
        attempt("swapped", swapped if rank else schedules.forward_forward(chunk.shape, count))
        attempt("fewer", *((serial, count) if rank else (schedules.serial(chunk.shape, count - 1), count - 1)))
        attempt("invalid on one", invalid if rank else serial)
        attempt("invalid on both", invalid)
        try:
            bench.reset()
            runner.run(serial, chunk, bench.batches() if rank else [{"nonsense": 1}] * count)
            seen["bad batch"] = "ran"
        except (RankMismatchError, TypeError, ScheduleError, StepError) as error:
            seen["bad batch"] = type(error).__name__
        attempt("afterwards", serial)
        joined = ChunkPlan.of(chunk.layers)  # has no model, and exchanges tokens all the same
        orders = schedules.serial(joined.shape, count), schedules.combined_1f1b(joined.shape, count)
        hidden = torch.zeros(cell.seq, cell.batch, bench.model.config.hidden_size, requires_grad=True)
        try:
            runner.run(orders[rank], joined, [hidden] * count)
            seen["joined"] = "ran"
        except Exception as error:
            seen["joined"] = type(error).__name__
    seen["right"] = bench.check(serial, streams="threads")
    seen["threads"] = [thread.name for thread in threading.enumerate() if thread.name.startswith("layernodes")]
    return seen


def _exchanged(schedule: Schedule) -> list[Step]:
    """The same schedule with microbatches 0 and 1 in each other's place: valid, and different."""
    swap = {0: 1, 1: 0}
    return [Step(step.phase, swap.get(step.microbatch, step.microbatch), step.layer, step.slot) for step in schedule]


def killed_peer(name: str, group_seconds: float) -> dict[str, Any]:
    """Rank 1 is killed in the middle of a step; what rank 0 gets, and how long after its last step."""
    cell = by_name(name)
    use_layout(cell, seconds=group_seconds)
    bench = Bench(cell)
    schedule = schedules.combined_1f1b(bench.chunk().shape, len(bench.microbatches))
    latest = time.monotonic()

    def die(step: Step) -> None:
        if str(step) == "F1.L1.mlp" and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    def note(_: Step) -> None:
        nonlocal latest
        latest = time.monotonic()

    bench.reset()
    runner = Runner(streams="threads", before_step=die, after_step=note)
    try:
        runner.run(schedule, bench.chunk(), bench.batches(), bench.loss_grads())
    except StepError as error:
        seconds = time.monotonic() - latest
        return {"step": error.step, "seconds": seconds, "completed": len(error.completed), "thread": seconds_to_end()}
    return {"step": None}


def seconds_to_end() -> float:
    """How long the threads of a run take to end."""
    began = time.monotonic()
    for thread in threading.enumerate():
        if thread.name.startswith("layernodes"):
            thread.join()
    return time.monotonic() - began


def empty_rank(names: Sequence[str]) -> dict[str, Any]:
    """No token for the last rank's experts: gradients of zeros, equal to plain, the same collectives on both ranks."""
    found: dict[str, Any] = {}
    for name in names:
        cell: Cell = by_name(name)
        use_layout(cell)
        bench = Bench(cell)
        chunk = bench.chunk()
        for case in (schedules.combined_1f1b, schedules.forward_forward):
            schedule = case(chunk.shape, len(bench.microbatches))
            found[f"{name} {case.__name__}"] = bench.check(schedule, streams="threads")
            log = CollectiveLog()
            bench.run(schedule, streams="threads", before_step=log.begin, after_step=log.end)
            found[f"{name} {case.__name__} collectives"] = log.by_lane
        found[f"{name} gradients"] = expert_gradients(bench.model)
    return found


def build_chunk(name: str) -> str:
    """Only that a chunk of this cell can be planned."""
    cell = by_name(name)
    use_layout(cell)
    return str(ChunkPlan.build(Bench(cell).model).shape)


def dropout_draws(cells: Mapping[str, Cell]) -> dict[str, dict[str, list[str]]]:
    """The generator's state at each draw of dropout, in the plain model and under a runner in both modes."""
    return {name: _dropout_draws(cell) for name, cell in cells.items()}


def _dropout_draws(cell: Cell) -> dict[str, list[str]]:
    use_layout(cell)
    bench = Bench(cell)
    shape = bench.chunk().shape
    count = len(bench.microbatches)
    serial, other = schedules.serial(shape, count), schedules.forward_forward(shape, count)
    draws: list[str] = []
    plain_dropout = torch.nn.functional.dropout

    def noting(x: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
        if p and training:
            draws.append(hashlib.sha256(torch.get_rng_state().numpy().tobytes()).hexdigest())
        return plain_dropout(x, p, training, inplace)

    with mock.patch.object(torch.nn.functional, "dropout", noting):
        bench.reset()
        for microbatch in bench.microbatches:
            bench.model(**microbatch.inputs)
        found: dict[str, list[str]] = {"model": list(draws)}
        left = {}
        for case, schedule, rng, streams in (
            ("plain", serial, "plain", "threads"),
            ("per_step", serial, "per_step", "inline"),
            ("interleaved", other, "per_step", "threads"),
        ):
            draws.clear()
            left[case] = bench.run(schedule, rng=rng, streams=streams)
            found[case] = list(draws)
    found["draws"] = ["model", "plain", "per_step"]
    found["not plain"] = differing(bench.expected(serial), left["plain"])
    found["not serial"] = differing(left["per_step"], left["interleaved"])
    return found
