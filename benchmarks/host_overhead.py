"""Host overhead of a slot: ours and Megatron-Core's own plan, over the floor, with trivial slot functions.

One slot's forward and backward, per microbatch, everything that is built for the microbatch included:

    floor      detach the input, run the operation, call autograd's engine once
    megatron   build a chunk's layer plans (``TransformerLayerSchedulePlan``), run them forward, then backward
    ours       open a chunk run and run a serial schedule, on inline streams and on threads

The four alternate in one process; figures are medians over the repetitions. On threads, a slot hands over twice, once a
step; where nothing else runs, most of a hand-over is the time that a core takes to wake up from its sleep. So that is
measured twice: as it is, and while processes of the lowest priority keep every core awake. Beside it stands a bare
hand-over: two threads that pass a lock to and fro and do nothing else.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from megatron.core.models.common.model_chunk_schedule_plan import TransformerLayerSchedulePlan
from megatron.core.pipeline_parallel.utils import get_comm_stream, get_comp_stream, set_streams
from torch import Tensor
from torch.autograd import Variable

from benchmarks._trivial import TrivialNode
from layernodes import ChunkPlan, LayerPlan, Runner, Slot, StreamType, schedules
from layernodes.demo.model import build_model
from layernodes.demo.settings import DemoSettings
from layernodes.demo.world import demo_world

NUM_SLOTS = 4
_BARE = "bare hand-overs"


class Freeing(TrivialNode):
    """Lets go of its input, as all slots but the first do."""

    def frees_input(self) -> bool:
        return True


class PreDispatch(TrivialNode):
    slot = Slot.PRE_DISPATCH_COMPUTATION


class Dispatch(Freeing):
    slot = Slot.MOE_DISPATCH
    stream = StreamType.COMM


class Combine(Freeing):
    slot = Slot.MOE_COMBINE
    stream = StreamType.COMM


NODES = {
    Slot.PRE_DISPATCH_COMPUTATION: PreDispatch,
    Slot.MOE_DISPATCH: Dispatch,
    Slot.MLP: Freeing,
    Slot.MOE_COMBINE: Combine,
}


def floor(x: Tensor, gradient: Tensor, num_layers: int) -> Callable[[], None]:
    """The least that a slot's forward and backward take."""

    def run() -> None:
        value: Tensor = x
        pairs = []
        for _ in range(num_layers * NUM_SLOTS):
            leaf = value.detach()
            leaf.requires_grad_(True)
            value = leaf * 2.0
            pairs.append((leaf, value))
        current = gradient
        for leaf, output in reversed(pairs):
            Variable._execution_engine.run_backward(
                (output,), (current,), False, False, (), allow_unreachable=True, accumulate_grad=True
            )
            current = leaf.grad

    return run


def megatron(x: Tensor, gradient: Tensor, layer: Any, num_layers: int) -> Callable[[], None]:
    """Megatron-Core's own plan of a real MoE layer, built for each microbatch; then its slots do the same trivial
    work."""
    set_streams()
    state = SimpleNamespace()

    def trivial(node: Any, hidden: Tensor) -> Tensor:
        return hidden * 2.0

    def run() -> None:
        event = torch.cuda.Event()
        plans = [
            TransformerLayerSchedulePlan(
                layer,
                event,
                state,
                get_comp_stream,
                get_comm_stream,
                {"is_first_layer": i == 0, "is_last_layer": i == num_layers - 1},
            )
            for i in range(num_layers)
        ]
        value: Tensor = x
        for plan in plans:
            for node in (plan.pre_dispatch_computation, plan.moe_dispatch, plan.mlp, plan.moe_combine):
                node.submodule = trivial
                value = node.forward(value)
        current = gradient
        for plan in reversed(plans):
            for node in (plan.moe_combine, plan.mlp, plan.moe_dispatch, plan.pre_dispatch_computation):
                current = node.backward(current)
            plan.release_state()

    return run


def ours(x: Tensor, gradient: Tensor, num_layers: int, streams: str) -> tuple[Callable[[], None], Runner]:
    """Our runner over trivial nodes."""
    chunk = ChunkPlan.of([LayerPlan.build(torch.nn.Identity(), nodes=dict(NODES)) for _ in range(num_layers)])
    schedule = schedules.serial(chunk.shape, 1)
    runner = Runner(streams)
    return lambda: (runner.run(schedule, chunk, [x], [gradient]), None)[1], runner


def bare_hand_overs(num_layers: int) -> Callable[[], None]:
    """As many hand-overs as the slots take on threads, of locks alone."""
    count = num_layers * NUM_SLOTS

    def run() -> None:
        there, back = threading.Lock(), threading.Lock()
        there.acquire()
        back.acquire()

        def answer() -> None:
            for _ in range(count):
                there.acquire()
                back.release()

        thread = threading.Thread(target=answer)
        thread.start()
        for _ in range(count):
            there.release()
            back.acquire()
        thread.join()

    return run


@contextmanager
def cores_awake() -> Iterator[None]:
    """Keep every core busy at the lowest priority there is, so that whoever wants one finds it awake."""
    command = [sys.executable, "-S", "-c", _SPIN]
    spinners = [subprocess.Popen(command) for _ in range(os.cpu_count() or 1)]
    try:
        yield
    finally:
        for spinner in spinners:
            spinner.kill()
            spinner.wait()


_SPIN = """
import os
if hasattr(os, "SCHED_IDLE"):
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
else:
    os.nice(19)
parent = os.getppid()
while os.getppid() == parent:
    for _ in range(100_000):
        pass
"""


def measure(layer: Any, num_layers: int, repetitions: int) -> dict[str, Any]:
    """Microseconds a slot, median and spread, of each; and microseconds a hand-over."""
    x = torch.randn(4, 4, requires_grad=True)
    gradient = torch.ones(4, 4)
    inline, inline_runner = ours(x, gradient, num_layers, "inline")
    threads, threads_runner = ours(x, gradient, num_layers, "threads")
    runs = {
        "floor": floor(x, gradient, num_layers),
        "megatron": megatron(x, gradient, layer, num_layers),
        "ours, inline": inline,
        "ours, threads": threads,
    }
    threaded = {"ours, inline": inline, "ours, threads": threads, _BARE: bare_hand_overs(num_layers)}
    times = _alternate(runs | threaded, num_layers, repetitions)
    with cores_awake():
        awake = _alternate(threaded, num_layers, repetitions)
    inline_runner.close()
    threads_runner.close()
    medians = {name: statistics.median(values) for name, values in times.items() if name != _BARE}
    base = medians["floor"]
    return {
        "layers": num_layers,
        "repetitions": repetitions,
        "microseconds_per_slot": medians,
        "spread": {name: (min(times[name]), max(times[name])) for name in medians},
        "over_floor": {name: value - base for name, value in medians.items() if name != "floor"},
        "share_of_megatron": (medians["ours, inline"] - base) / (medians["megatron"] - base),
        "microseconds_per_hand_over": {"as it is": _hand_over(times), "cores kept awake": _hand_over(awake)},
        "microseconds_per_bare_hand_over": {
            "as it is": statistics.median(times[_BARE]) / 2,
            "cores kept awake": statistics.median(awake[_BARE]) / 2,
        },
    }


def _alternate(runs: Mapping[str, Callable[[], object]], num_layers: int, repetitions: int) -> dict[str, list[float]]:
    """Microseconds a slot of each run, by repetition."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for repetition in range(repetitions + 3):
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            if repetition >= 3:
                times[name].append((time.perf_counter() - start) / (num_layers * NUM_SLOTS) * 1e6)
    return times


def _hand_over(times: Mapping[str, Sequence[float]]) -> float:
    """What threads take over inline streams for each step, of which a slot has two."""
    return (statistics.median(times["ours, threads"]) - statistics.median(times["ours, inline"])) / 2


def main() -> int:
    """Print the table; with ``--json`` one document."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--repetitions", type=int, default=200)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with demo_world() as world:
        model = build_model(DemoSettings(layers=1), num_ranks=1, device=world.device)
        found = measure(model.decoder.layers[0], options.layers, options.repetitions)
    if options.json:
        print(json.dumps(found, indent=1))
        return 0
    print(f"{'':16}{'us / slot':>12}{'over floor':>12}{'min .. max':>24}")
    for name, median in found["microseconds_per_slot"].items():
        low, high = found["spread"][name]
        print(f"{name:16}{median:12.1f}{found['over_floor'].get(name, 0.0):12.1f}{low:12.1f} .. {high:9.1f}")
    print(f"ours over Megatron-Core's overhead: {found['share_of_megatron']:.2f}")
    for of in ("hand_over", "bare_hand_over"):
        hand_overs = found[f"microseconds_per_{of}"]
        text = ", ".join(f"{value:.1f} {name}" for name, value in hand_overs.items())
        print(f"us / {of.replace('_', ' ')} between threads: {text}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
