"""Real overlap: two processes, each in a network namespace and on a core of its own, joined by a rate-limited link.

EP=2 over gloo. The link's rate is set so that communication : computation is about 1:3, 1:1.5 and 1:1. At each ratio,
every
schedule runs in turn, several times, on thread streams:

    serial           nothing overlaps: its makespan is computation + communication
    combined_1f1b    forward of one microbatch beside the backward of the one before
    bound            max(computation, communication), which nothing can beat

    hideable = min(computation, communication) * (M - 1) / M     the first forward and the last backward have no partner
    hidden   = serial's makespan - the schedule's

Needs root, ``ip`` and ``tc`` (Linux); where namespaces cannot be made it says so and measures nothing.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from _link import bytes_sent, leave, limit_link, make_link, remove_link, run_workers, two_ranks

from layernodes import ChunkPlan, Runner, StreamType, schedules
from layernodes.demo.data import make_microbatches, read_text
from layernodes.demo.model import build_model
from layernodes.demo.settings import DemoSettings

SCHEDULES = {
    "serial": schedules.serial,
    "combined_1f1b": schedules.combined_1f1b,
}


def main() -> int:
    """Run the worker's half, or set the link up, start both workers at each ratio, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ratios", type=float, nargs="+", default=[1 / 3, 1 / 1.5, 1.0])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--microbatches", type=int, default=6)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker is not None:
        return _work(options)
    reason = make_link()
    if reason:
        print(f"network namespaces cannot be made here, so nothing was measured: {reason}", file=sys.stderr)
        return 3
    try:
        unlimited = _run_workers(options)
        rows = []
        for ratio in options.ratios:
            seconds = unlimited["serial"]["compute"] * ratio
            limit_link(bits_per_second=8 * unlimited["bytes"] / seconds)
            rows.append(_row(ratio, _run_workers(options), options.microbatches))
    finally:
        remove_link()
    print(json.dumps(rows, indent=1) if options.json else _table(rows))
    return 0


def _row(ratio: float, found: dict[str, Any], num_microbatches: int) -> dict[str, Any]:
    serial, combined = found["serial"], found["combined_1f1b"]
    hideable = min(serial["compute"], serial["comm"]) * (num_microbatches - 1) / num_microbatches
    return {
        "wanted": ratio,
        "comm_to_compute": serial["comm"] / serial["compute"],
        "compute": serial["compute"],
        "comm": serial["comm"],
        "serial": serial["makespan"],
        "combined_1f1b": combined["makespan"],
        "bound": max(serial["compute"], serial["comm"]),
        "hidden_share": (serial["makespan"] - combined["makespan"]) / hideable,
    }


def _table(rows: list[dict[str, Any]]) -> str:
    names = ("comm_to_compute", "compute", "comm", "serial", "combined_1f1b", "bound", "hidden_share")
    lines = ["  ".join(f"{name:>15}" for name in names)]
    lines += ["  ".join(f"{row[name]:15.3f}" for name in names) for row in rows]
    return "\n".join([*lines, "(seconds, medians; hidden_share of what can be hidden)"])


def _run_workers(options: argparse.Namespace) -> dict[str, Any]:
    arguments = []
    for option in ("layers", "hidden", "microbatches", "repetitions"):
        arguments += [f"--{option}", str(getattr(options, option))]
    found: dict[str, Any] = run_workers(__file__, arguments)
    return found


def _work(options: argparse.Namespace) -> int:
    with two_ranks(options.worker, options.folder):
        settings = DemoSettings(layers=options.layers, hidden=options.hidden, microbatches=options.microbatches)
        found = _measure(settings, options.worker, options.repetitions)
        if options.worker == 0:
            leave(options.folder, found)
    return 0


def _measure(settings: DemoSettings, rank: int, repetitions: int) -> dict[str, Any]:
    device = torch.device("cpu")
    model = build_model(settings, num_ranks=2, device=device)
    microbatches = make_microbatches(
        read_text(None).content, settings.microbatches, rank=rank, num_ranks=2, device=device
    )
    batches = [
        {"input_ids": m.tokens, "position_ids": m.positions, "attention_mask": None, "labels": m.labels}
        for m in microbatches
    ]
    chunk = ChunkPlan.build(model, split_combine=True)
    orders = {name: make(chunk.shape, settings.microbatches) for name, make in SCHEDULES.items()}
    times: dict[str, dict[str, list[float]]] = {name: {"makespan": [], "compute": [], "comm": []} for name in orders}
    sent = 0
    with Runner("threads") as runner:
        for repetition in range(repetitions + 1):
            for name, order in orders.items():
                before = bytes_sent(rank)
                dist.barrier()
                timeline = runner.run(order, chunk, batches).timeline
                if repetition == 0:  # warm-up
                    sent = bytes_sent(rank) - before
                    continue
                times[name]["makespan"].append(timeline.makespan)
                for kind, stream in (("compute", StreamType.COMPUTE), ("comm", StreamType.COMM)):
                    busy = sum(i.end - i.start for i in timeline.intervals if i.stream is stream)
                    times[name][kind].append(busy)
    medians = {name: {kind: statistics.median(v) for kind, v in kinds.items()} for name, kinds in times.items()}
    return {**medians, "bytes": sent}


if __name__ == "__main__":
    sys.exit(main())
