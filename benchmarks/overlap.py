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
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks._link import bytes_sent, leave, limit_link, make_link, remove_link, run_workers, two_ranks
from benchmarks._measure import show, table
from layernodes import ChunkPlan, Runner, StreamType, optimize, profile, schedules
from layernodes.demo.data import make_microbatches, read_text
from layernodes.demo.model import build_model
from layernodes.demo.settings import DemoSettings

CALIBRATIONS = 2
"""Runs that set the link's rate, and the repetitions of each."""


def main() -> int:
    """Run the worker's half, or set the link up, start both workers at each ratio, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ratios", type=float, nargs="+", default=[1 / 3, 1 / 1.5, 1.0])
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=768)
    parser.add_argument("--microbatches", type=int, default=6)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--only-serial", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker is not None:
        return _work(options)
    reason = make_link()
    if reason:
        print(f"network namespaces cannot be made here, so nothing was measured: {reason}", file=sys.stderr)
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
    for option in ("layers", "hidden", "microbatches"):
        arguments += [f"--{option}", str(getattr(options, option))]
    found: dict[str, Any] = run_workers("benchmarks.overlap", [*arguments, "--repetitions", str(repetitions)])
    return found


def _work(options: argparse.Namespace) -> int:
    with two_ranks(options.worker, options.folder):
        settings = DemoSettings(layers=options.layers, hidden=options.hidden, microbatches=options.microbatches)
        found = _measure(settings, options)
        if options.worker == 0:
            leave(options.folder, found)
    return 0


def _measure(settings: DemoSettings, options: argparse.Namespace) -> dict[str, Any]:
    device, rank = torch.device("cpu"), options.worker
    model = build_model(settings, num_ranks=2, device=device)
    microbatches = make_microbatches(
        read_text(None).content, settings.microbatches, rank=rank, num_ranks=2, device=device
    )
    batches = [
        {"input_ids": m.tokens, "position_ids": m.positions, "attention_mask": None, "labels": m.labels}
        for m in microbatches
    ]
    chunk = ChunkPlan.build(model, split_combine=True)
    orders = {"serial": schedules.serial(chunk.shape, settings.microbatches)}
    if not options.only_serial:
        costs = profile(chunk, batches[0], repetitions=options.repetitions, streams="threads")
        orders["combined_1f1b"] = schedules.combined_1f1b(chunk.shape, settings.microbatches)
        orders["optimized"] = optimize(chunk.shape, costs, num_microbatches=settings.microbatches, max_states=20_000)
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
