"""Real overlap: two processes, each in a network namespace and on a core of its own, joined by a rate-limited link.

EP=2 over gloo. The link's rate is set so that communication : computation is about 1:3, 1:1.5 and 1:1. At each ratio,
every schedule runs in turn, several times, on thread streams:

    serial           nothing overlaps: its makespan is computation + communication
    combined_1f1b    forward of one microbatch beside the backward of the one before
    optimized        the optimizer's choice for the costs that ``profile`` finds on that link
    bound            max(computation, communication), which nothing can beat

    hideable = min(computation, communication) * (M - 1) / M     the first forward and the last backward have no partner
    hidden   = serial's makespan - the schedule's

Needs root, ``ip`` and ``tc`` (Linux); where namespaces cannot be made it says so, measures nothing, and exits with 3.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from typing import Any

import torch.distributed as dist

from benchmarks._link import bytes_sent, limit_link, make_link, remove_link, run_workers
from benchmarks._linked import link_parser, passed_on, work
from benchmarks._measure import show, table
from layernodes import ChunkPlan, Runner, StreamType, optimize, profile, schedules

CALIBRATIONS = 2
"""Runs that set the link's rate, and the repetitions of each."""


def main() -> int:
    """Run the worker's half, or set the link up, start both workers at each ratio, and print the table."""
    parser = link_parser(__doc__, layers=2, hidden=768, microbatches=6)
    parser.add_argument("--ratios", type=float, nargs="+", default=[1 / 3, 1 / 1.5, 1.0])
    parser.add_argument("--only-serial", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker is not None:
        return work(options, _measure)
    if not make_link():
        return 3
    try:
        free = _run_workers(options, only_serial=True)
        rows = []
        for ratio in options.ratios:
            _limit(free, ratio, options)
            rows.append(_row(ratio, _run_workers(options), options.microbatches))
    finally:
        remove_link()
    show({"rows": rows}, _text(rows), as_json=options.json)
    return 0


def _limit(free: dict[str, Any], ratio: float, options: argparse.Namespace) -> None:
    """Set the link's rate so that exchanges take ``ratio`` times as long as computation, their fixed cost included."""
    rate = 8 * free["bytes"] / (free["serial"]["compute"] * ratio)
    for _ in range(CALIBRATIONS):
        limit_link(rate)
        serial = _run_workers(options, only_serial=True)["serial"]
        rate *= serial["comm"] / (serial["compute"] * ratio)
    limit_link(rate)


def _row(ratio: float, found: dict[str, Any], num_microbatches: int) -> dict[str, Any]:
    serial = found["serial"]
    hideable = min(serial["compute"], serial["comm"]) * (num_microbatches - 1) / num_microbatches
    return {
        "wanted": ratio,
        "comm_to_compute": serial["comm"] / serial["compute"],
        "compute": serial["compute"],
        "comm": serial["comm"],
        "bound": max(serial["compute"], serial["comm"]),
        "schedules": {
            name: {
                "makespan": found[name]["makespan"],
                "spread": found[name]["spread"],
                "hidden_share": (serial["makespan"] - found[name]["makespan"]) / hideable,
            }
            for name in ("serial", "combined_1f1b", "optimized")
        },
    }


def _text(rows: list[dict[str, Any]]) -> str:
    columns = ["comm : compute", "schedule", "seconds", "min", "max", "hidden share", "compute", "comm", "bound"]
    cells = [
        (row["comm_to_compute"], name, one["makespan"], *one["spread"], one["hidden_share"], *_sums(row))
        for row in rows
        for name, one in row["schedules"].items()
    ]
    return f"{table(columns, cells)}\n(seconds, medians; hidden share of what can be hidden)"


def _sums(row: dict[str, Any]) -> tuple[float, float, float]:
    return row["compute"], row["comm"], row["bound"]


def _run_workers(options: argparse.Namespace, *, only_serial: bool = False) -> dict[str, Any]:
    arguments = ["--only-serial"] if only_serial else []
    repetitions = CALIBRATIONS if only_serial else options.repetitions
    arguments += [*passed_on(options, "layers", "hidden", "microbatches"), "--repetitions", str(repetitions)]
    found: dict[str, Any] = run_workers("benchmarks.overlap", arguments)
    return found


def _measure(chunk: ChunkPlan, batches: list[dict[str, Any]], options: argparse.Namespace) -> dict[str, Any]:
    rank, num_microbatches = options.worker, len(batches)
    orders = {"serial": schedules.serial(chunk.shape, num_microbatches)}
    if not options.only_serial:
        costs = profile(chunk, batches[0], repetitions=options.repetitions, streams="threads")
        orders["combined_1f1b"] = schedules.combined_1f1b(chunk.shape, num_microbatches)
        orders["optimized"] = optimize(chunk.shape, costs, num_microbatches=num_microbatches, max_states=20_000)
    found: dict[str, dict[str, list[float]]] = {name: {"makespan": [], "compute": [], "comm": []} for name in orders}
    sent = 0
    with Runner("threads") as runner:
        for repetition in range(options.repetitions + 1):
            for name, order in orders.items():
                before = bytes_sent(rank)
                dist.barrier()
                timeline = runner.run(order, chunk, batches).timeline
                if repetition == 0:  # warm-up
                    sent = bytes_sent(rank) - before
                    continue
                found[name]["makespan"].append(timeline.makespan)
                found[name]["compute"].append(timeline.busy(StreamType.COMPUTE))
                found[name]["comm"].append(timeline.busy(StreamType.COMM))
    result: dict[str, Any] = {
        name: {k: statistics.median(v) for k, v in kinds.items()} for name, kinds in found.items()
    }
    for name, kinds in found.items():
        result[name]["spread"] = (min(kinds["makespan"]), max(kinds["makespan"]))
    return {**result, "bytes": sent}


if __name__ == "__main__":
    sys.exit(main())
