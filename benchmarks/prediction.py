"""Predicted against measured: how long four schedules take on two ranks over a rate-limited link.

EP=2 over gloo, each rank in a network namespace and on a core of its own, thread streams. The link is limited so that
communication takes ``--ratio`` times as long as computation. Then, on that link:

    profile     measures what each step costs, and how far computation slows down beside communication
    simulate    predicts the makespan of each schedule from those costs
    Runner      runs every schedule once

in turn, ``--repetitions`` times, so that other work on the machine meets all of them alike; medians count::

    error = predicted / measured - 1

Needs root, ``ip`` and ``tc`` (Linux); where namespaces cannot be made it says so, measures nothing, and exits with 3.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from benchmarks._link import bytes_sent, limit_link, make_link, remove_link, run_workers
from benchmarks._linked import link_parser, passed_on, work
from layernodes import (
    ChunkPlan,
    CostModel,
    Runner,
    Schedule,
    StreamType,
    Timeline,
    optimize,
    profile,
    schedules,
    simulate,
)

_PROFILED = 3
"""Repetitions of each profile."""


def main() -> int:
    """Run the worker's half, or set the link up, start both workers, and print the table."""
    parser = link_parser(__doc__, layers=4, hidden=128, microbatches=4)
    parser.add_argument("--ratio", type=float, default=0.7, help="communication : computation (default: %(default)s)")
    parser.add_argument("--traces", type=Path, metavar="FOLDER", help="leave the last measured timelines there")
    parser.add_argument("--only-bytes", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker is not None:
        return work(options, _count_bytes if options.only_bytes else _measure)
    if not make_link():
        return 3
    try:
        free = _run_workers(options, "--only-bytes")
        limit_link(8 * free["bytes"] / (free["compute"] * options.ratio))
        found = _run_workers(options)
    finally:
        remove_link()
    print(json.dumps(found, indent=1) if options.json else _table(found))
    return 0


def _run_workers(options: argparse.Namespace, *switches: str) -> Any:
    arguments = [*switches, *passed_on(options, "layers", "hidden", "microbatches", "repetitions")]
    if options.traces is not None:
        arguments += ["--traces", str(options.traces.absolute())]
    return run_workers("benchmarks.prediction", arguments)


def _count_bytes(chunk: ChunkPlan, batches: Sequence[Any], options: argparse.Namespace) -> dict[str, Any]:
    """Seconds of computation of one microbatch, and the bytes that it sends."""
    order = schedules.serial(chunk.shape, 1)
    seconds = []
    with Runner("threads") as runner:
        runner.run(order, chunk, batches[:1])
        before = bytes_sent(options.worker)
        for _ in range(options.repetitions):
            dist.barrier()
            seconds.append(runner.run(order, chunk, batches[:1]).timeline.busy(StreamType.COMPUTE))
        sent = (bytes_sent(options.worker) - before) / options.repetitions
    return {"compute": statistics.median(seconds), "bytes": sent}


def _measure(chunk: ChunkPlan, batches: Sequence[Any], options: argparse.Namespace) -> dict[str, Any]:
    costs = [profile(chunk, batches[0], repetitions=_PROFILED, streams="threads")]
    orders = _orders(chunk, costs[0], len(batches))
    predicted: dict[str, list[Timeline]] = {name: [] for name in orders}
    measured: dict[str, list[float]] = {name: [] for name in orders}
    with Runner("threads") as runner:
        for order in orders.values():  # warms up
            runner.run(order, chunk, batches)
        for _ in range(options.repetitions):
            costs.append(profile(chunk, batches[0], repetitions=_PROFILED, warmup=0, streams="threads"))
            for name, order in orders.items():
                predicted[name].append(simulate(order, costs[-1], chunk.shape))
                dist.barrier()
                timeline = runner.run(order, chunk, batches).timeline
                measured[name].append(timeline.makespan)
                if options.traces is not None and options.worker == 0:
                    timeline.to_perfetto(options.traces / f"{name}.json")
    return _compare(costs[1:], predicted, measured)


def _orders(chunk: ChunkPlan, costs: CostModel, num_microbatches: int) -> dict[str, Schedule]:
    return {
        "serial": schedules.serial(chunk.shape, num_microbatches),
        "combined_1f1b": schedules.combined_1f1b(chunk.shape, num_microbatches),
        "early_release": schedules.combined_1f1b(chunk.shape, num_microbatches, early_release=True),
        "optimized": optimize(chunk.shape, costs, num_microbatches=num_microbatches, max_states=20_000),
    }


def _compare(
    costs: Sequence[CostModel], predicted: dict[str, list[Timeline]], measured: dict[str, list[float]]
) -> dict[str, Any]:
    rows = []
    for name, seconds in measured.items():
        middle = statistics.median(seconds)
        expected = statistics.median(timeline.makespan for timeline in predicted[name])
        rows.append(
            {
                "schedule": name,
                "predicted": expected,
                "measured": middle,
                "spread": (max(seconds) - min(seconds)) / middle,
                "error": expected / middle - 1,
            }
        )
    serial = predicted["serial"]
    return {
        "comm_to_compute": statistics.median(t.busy(StreamType.COMM) / t.busy(StreamType.COMPUTE) for t in serial),
        "compute_slowdown": statistics.median(c.compute_slowdown for c in costs),
        "communication_slowdown": statistics.median(c.communication_slowdown for c in costs),
        "typical_spread": statistics.median(c.measurement.typical_spread for c in costs if c.measurement is not None),
        "median_error": statistics.median(abs(row["error"]) for row in rows),
        "predicted_ranking": [row["schedule"] for row in sorted(rows, key=lambda row: row["predicted"])],
        "measured_ranking": [row["schedule"] for row in sorted(rows, key=lambda row: row["measured"])],
        "rows": rows,
    }


def _table(found: dict[str, Any]) -> str:
    lines = [f"{'schedule':<16}{'predicted':>12}{'measured':>12}{'spread':>10}{'error':>10}"]
    for row in found["rows"]:
        lines.append(
            f"{row['schedule']:<16}{row['predicted']:>10.4f} s{row['measured']:>10.4f} s"
            f"{100 * row['spread']:>8.1f} %{100 * row['error']:>8.1f} %"
        )
    return "\n".join(
        [
            *lines,
            f"communication : computation  {found['comm_to_compute']:.2f}",
            f"slow-down of computation beside communication  {found['compute_slowdown']:.2f}",
            f"slow-down of communication beside computation  {found['communication_slowdown']:.2f}",
            f"median error  {100 * found['median_error']:.1f} %",
            f"predicted ranking  {', '.join(found['predicted_ranking'])}",
            f"measured ranking   {', '.join(found['measured_ranking'])}",
            "(makespans, medians; spread: from the shortest to the longest)",
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
