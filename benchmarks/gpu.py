"""On an accelerator: host time of a slot, and a device copy beside the experts' matrix products.

One MoE-like layer of trivial size for the host's time, of real size for the overlap. The exchange is a copy on the
device of as many bytes as a rank's all-to-all would move, on the communication stream:

    host, launch     host seconds until ``Runner.run`` and Megatron-Core's plan have launched a slot, forward + backward
    overlap          serial and ``combined_1f1b``: device time from first to last step, copies, products, what is hidden

Without an accelerator it says so and measures nothing (exit code 3). Nobody has run it yet: no accelerator was at hand.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks._measure import show, table
from benchmarks.host_overhead import floor, megatron
from benchmarks.host_overhead import ours as trivial_runner
from layernodes import ChunkPlan, LayerPlan, Runner, ScheduleNode, Slot, StreamType, schedules
from layernodes.demo.model import build_model
from layernodes.demo.settings import DemoSettings
from layernodes.demo.world import demo_world


class _Matmul(ScheduleNode):
    """Attention's or the experts' share: a few matrix products."""

    slot = Slot.MLP
    stream = StreamType.COMPUTE
    products = 4

    def __init__(self, layer: nn.Linear) -> None:
        self._layer = layer

    def forward(self, ctx: Any, *inputs: Tensor) -> Tensor:
        value = inputs[0]
        for _ in range(self.products):
            value = self._layer(value)
        return value

    def touches_rng(self) -> bool:
        return False


class _Attention(_Matmul):
    slot = Slot.PRE_DISPATCH_COMPUTATION
    products = 2


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0].clone()


class _Exchange(ScheduleNode):
    """What an all-to-all moves, as copies on the device."""

    slot = Slot.MOE_DISPATCH
    stream = StreamType.COMM
    copies = 8

    def __init__(self, layer: nn.Module) -> None:
        pass

    def forward(self, ctx: Any, *inputs: Tensor) -> Tensor:
        value = inputs[0]
        for _ in range(self.copies):
            value = _Copy.apply(value)
        return value

    def touches_rng(self) -> bool:
        return False


class _Return(_Exchange):
    slot = Slot.MOE_COMBINE


NODES = {
    Slot.PRE_DISPATCH_COMPUTATION: _Attention,
    Slot.MOE_DISPATCH: _Exchange,
    Slot.MLP: _Matmul,
    Slot.MOE_COMBINE: _Return,
}


def main() -> int:
    """Print both tables; with ``--json`` one document."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--microbatches", type=int, default=6)
    parser.add_argument("--repetitions", type=int, default=50)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if not torch.accelerator.is_available():
        print("there is no accelerator here, so nothing was measured", file=sys.stderr)
        return 3
    with demo_world() as world:
        model = build_model(DemoSettings(layers=1), num_ranks=1, device=world.device)
        host = _host(model.decoder.layers[0], options.layers, options.repetitions, world.device)
        overlap = measure_overlap(options, world.device, "cuda")
    rows = [(name, *found.values()) for name, found in host.items()]
    text = table(["us / slot", "launched", "done"], rows) + "\n\n"
    text += table(["ms", *overlap["serial"]], [(name, *found.values()) for name, found in overlap.items()])
    show({"host_microseconds_per_slot": host, "overlap_milliseconds": overlap}, text, as_json=options.json)
    return 0


def _host(layer: Any, num_layers: int, repetitions: int, device: torch.device) -> dict[str, dict[str, float]]:
    x = torch.randn(4, 4, device=device, requires_grad=True)
    gradient = torch.ones(4, 4, device=device)
    run, runner = trivial_runner(x, gradient, num_layers, "cuda")
    runs = {"floor": floor(x, gradient, num_layers), "megatron": megatron(x, gradient, layer, num_layers), "ours": run}
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in runs}
    with runner:
        for repetition in range(repetitions + 5):
            for name, one in runs.items():
                launched = _launch_seconds(one)
                if repetition >= 5:
                    found[name].append(launched)
    scale = 1e6 / (num_layers * len(NODES))
    return {
        name: {
            "launched": scale * statistics.median(a for a, _ in pairs),
            "done": scale * statistics.median(b for _, b in pairs),
        }
        for name, pairs in found.items()
    }


def _launch_seconds(run: Callable[[], None]) -> tuple[float, float]:
    """Host seconds until ``run`` returns, and until the device is done. (A run of ours ends with the device's.)"""
    torch.accelerator.synchronize()
    start = time.perf_counter()
    run()
    launched = time.perf_counter()
    torch.accelerator.synchronize()
    return launched - start, time.perf_counter() - start


def measure_overlap(options: argparse.Namespace, device: torch.device, streams: str) -> dict[str, dict[str, float]]:
    """Milliseconds of each order, medians, and the share of the hideable time that it hides."""
    layers = [
        nn.Linear(options.hidden, options.hidden, bias=False, device=device, dtype=torch.bfloat16)
        for _ in range(options.layers)
    ]
    chunk = ChunkPlan.of([LayerPlan.build(layer, nodes=dict(NODES)) for layer in layers])
    batches = [
        torch.randn(options.tokens, options.hidden, device=device, dtype=torch.bfloat16, requires_grad=True)
        for _ in range(options.microbatches)
    ]
    orders = {
        name: make(chunk.shape, options.microbatches)
        for name, make in (("serial", schedules.serial), ("combined_1f1b", schedules.combined_1f1b))
    }
    found: dict[str, dict[str, list[float]]] = {name: {"makespan": [], "compute": [], "comm": []} for name in orders}
    with Runner(streams) as runner:
        for repetition in range(options.repetitions // 5 + 2):
            for name, order in orders.items():
                timeline = runner.run(order, chunk, batches).timeline
                if repetition >= 2:
                    found[name]["makespan"].append(1e3 * timeline.makespan)
                    for kind, stream in (("compute", StreamType.COMPUTE), ("comm", StreamType.COMM)):
                        busy = sum(i.end - i.start for i in timeline.intervals if i.stream is stream)
                        found[name][kind].append(1e3 * busy)
    medians = {name: {kind: statistics.median(v) for kind, v in kinds.items()} for name, kinds in found.items()}
    serial = medians["serial"]
    hideable = min(serial["compute"], serial["comm"]) * (options.microbatches - 1) / options.microbatches
    for one in medians.values():
        one["hidden_share"] = (serial["makespan"] - one["makespan"]) / hideable
    return medians


if __name__ == "__main__":
    sys.exit(main())
