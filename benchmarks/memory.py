"""Memory: peak live activation bytes of each schedule, against Megatron-Core's own plan and plain autograd.

The same microbatches, forward and backward, from no gradients; the peak of what operations made and is still alive,
parameters and inputs left out (``benchmarks._live``):

    plain          model(...), loss.backward()
    megatron       Megatron-Core's schedule plan on its own callables
    install        the same plan on our nodes
    runner         the same order as a schedule of ours, on inline streams

in three orders: microbatch after microbatch (``serial``), each forward beside the backward before it
(``combined_1f1b``), and that with attention going backward early (``early_release``). Figures are the most of all
ranks; the shares are ours over Megatron-Core's own, rank by rank, the greatest of them. One pass of each is measured:
bytes do not vary.

With MTP, Megatron-Core's own plan is not right to the bit: parameters that two nodes use get two gradients a microbatch
there, added to what earlier microbatches left. Ours are summed first, as in plain autograd, and the sum takes the room
of one such gradient.

On two ranks (EP=2) by default: on one, Megatron-Core's own plan cannot run a MoE layer, and is left out.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, Final, NamedTuple

from megatron.core.transformer.moe.moe_logging import destroy_moe_metrics_tracker
from torch import Tensor

import layernodes
from benchmarks._live import LiveBytes
from benchmarks._measure import on_ranks, show, table
from benchmarks._ways import Batches, combined_plans, demo_batches, plain, serial_plans
from layernodes import ChunkPlan, ChunkShape, Runner, Schedule, schedules
from layernodes.demo.model import build_model, seed_everything
from layernodes.demo.settings import DemoSettings
from layernodes.demo.world import World, demo_world

Peaks = Mapping[str, Mapping[str, int]]
"""Bytes, by order and way."""

OURS: Final = ("install", "runner")

_EARLY: Final = "ep_overlap_early_attn_memory_release"
_CONFIGURATIONS: Final[Mapping[str, Mapping[str, Any]]] = {
    "MoE": {},
    "top-4": {"topk": 4},
    "one expert a rank": {"experts": 2, "topk": 1},
    "MTP": {"mtp": True},
}


class _Order(NamedTuple):
    plans: Callable[[Any, Batches, Sequence[Tensor]], list[Tensor]]
    early: bool
    schedule: Callable[[ChunkShape, int], Schedule]


_ORDERS: Final[Mapping[str, _Order]] = {
    "serial": _Order(serial_plans, False, schedules.serial),
    "combined_1f1b": _Order(combined_plans, False, schedules.combined_1f1b),
    "early_release": _Order(combined_plans, True, partial(schedules.combined_1f1b, early_release=True)),
}


def main() -> int:
    """Print the table; with ``--json`` one document."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--microbatches", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="a small model, one configuration")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    ended = on_ranks(options.ranks, "benchmarks.memory", sys.argv[1:])
    if ended is not None:
        return ended
    sizes = {"layers": options.layers, "hidden": options.hidden, "microbatches": options.microbatches}
    if options.quick:
        sizes |= {"layers": 1, "microbatches": 2}
    names = ["MoE"] if options.quick else [*_CONFIGURATIONS]
    with demo_world() as world:
        found = {
            "ranks": world.num_ranks,
            **sizes,
            "configurations": {
                name: _measure(DemoSettings(**{**sizes, **_CONFIGURATIONS[name]}), world) for name in names
            },
        }
        if world.rank == 0:
            show(found, _text(found), as_json=options.json)
    return 0


def _measure(settings: DemoSettings, world: World) -> dict[str, Any]:
    destroy_moe_metrics_tracker()  # it has room for as many layers as the first model
    model = build_model(settings, num_ranks=world.num_ranks, device=world.device)
    batches, gradients = demo_batches(settings, world)
    with_megatron = world.num_ranks > 1
    by_rank = world.gather(
        peaks(model, batches, gradients, reset=lambda: seed_everything(settings.seed), with_megatron=with_megatron)
    )
    found = by_rank[0]
    return {
        "bytes": {
            order: {way: [peaks[order][way] for peaks in by_rank] for way in ways} for order, ways in found.items()
        },
        "share_of_megatron": {
            order: {way: max(peaks[order][way] / peaks[order]["megatron"] for peaks in by_rank) for way in OURS}
            for order, ways in found.items()
            if "megatron" in ways
        },
    }


def peaks(
    model: Any,
    batches: Batches,
    gradients: Sequence[Tensor],
    *,
    reset: Callable[[], object] = lambda: None,
    with_megatron: bool = True,
    orders: Sequence[str] = tuple(_ORDERS),
) -> Peaks:
    """Peak bytes of plain autograd, and of each way in each order.

    Args:
        model: the model chunk.
        batches: its microbatches, as a runner takes them.
        gradients: of their outputs.
        reset: called before each pass; sets the generators, so that tokens travel alike in all of them.
        with_megatron: whether to run Megatron-Core's own plan, which cannot run every model.
        orders: names of orders.
    """

    def peak(run: Callable[[], object]) -> int:
        model.zero_grad()
        reset()
        with LiveBytes() as counter:
            outputs = run()
        del outputs
        return counter.peak

    chunk = ChunkPlan.build(model)
    plain(model, batches, gradients)  # makes what the model keeps: rotary embeddings
    found = {"plain": {"plain": peak(lambda: plain(model, batches, gradients))}}
    with Runner("inline") as runner:
        for name in orders:
            order = _ORDERS[name]
            schedule = order.schedule(chunk.shape, len(batches))
            runs = _runs(model, batches, gradients, order)
            runs["runner"] = partial(runner.run, schedule, chunk, batches, gradients)
            if not with_megatron:
                del runs["megatron"]
            with _early_release(model, enabled=order.early):
                found[name] = {way: peak(run) for way, run in runs.items()}
    return found


def _runs(model: Any, batches: Batches, gradients: Sequence[Tensor], order: _Order) -> dict[str, Callable[[], object]]:
    def under(context: Callable[[], AbstractContextManager[Any]]) -> Callable[[], object]:
        def run() -> object:
            with context():
                return order.plans(model, batches, gradients)

        return run

    return {"megatron": under(nullcontext), "install": under(layernodes.install)}


@contextmanager
def _early_release(model: Any, *, enabled: bool) -> Iterator[None]:
    """Megatron-Core's own switch for the order, on each configuration object of the model."""
    configs = {id(module.config): module.config for module in model.modules() if hasattr(module, "config")}.values()
    before = [getattr(config, _EARLY) for config in configs]
    try:
        for config in configs:
            setattr(config, _EARLY, enabled)
        yield
    finally:
        for config, value in zip(configs, before, strict=True):
            setattr(config, _EARLY, value)


def _text(found: Mapping[str, Any]) -> str:
    parts = []
    for name, configuration in found["configurations"].items():
        plain_bytes = max(configuration["bytes"]["plain"]["plain"])
        shares = configuration["share_of_megatron"]
        rows = [
            (
                order,
                *(max(ways[way]) if way in ways else "-" for way in ("megatron", *OURS)),
                *(f"{shares[order][way]:.3f}" if order in shares else "-" for way in OURS),
            )
            for order, ways in configuration["bytes"].items()
            if order != "plain"
        ]
        columns = ["", "megatron", *OURS, *(f"{way} / megatron" for way in OURS)]
        parts.append(f"{name}: plain autograd {plain_bytes} bytes\n{table(columns, rows)}")
    parts.append(f"({found['ranks']} ranks; {found['layers']} layers, {found['microbatches']} microbatches)")
    return "\n\n".join(parts)


if __name__ == "__main__":
    sys.exit(main())
