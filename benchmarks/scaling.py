"""How time grows with layers and with microbatches: text, checks, compiling, simulating, running.

Each figure is the median over repetitions that alternate over the sizes. ``exponent`` is the slope of log time over
log size between the smallest and the largest: 1 is linear. With ``--plot FILE`` a picture (matplotlib).
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from benchmarks._measure import alternate, show, table
from benchmarks._trivial import TrivialNode
from layernodes import (
    ChunkPlan,
    ChunkShape,
    CostModel,
    LayerPlan,
    Runner,
    Schedule,
    Slot,
    schedules,
    simulate,
    validate,
)
from layernodes.plan.program import compile_steps
from layernodes.plan.rules import Rules

LAYERS = (8, 16, 32, 64)
MICROBATCHES = (4, 8, 16, 32)
BASE_LAYERS, BASE_MICROBATCHES = 8, 8


def main() -> int:
    """Print both tables; with ``--json`` one document."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    sizes = {
        "layers": [(layers, layers, BASE_MICROBATCHES) for layers in LAYERS],
        "microbatches": [(microbatches, BASE_LAYERS, microbatches) for microbatches in MICROBATCHES],
    }
    found = {along: _grow(places, options.repetitions) for along, places in sizes.items()}
    if options.plot is not None:
        _plot(found, options.plot)
    text = "\n\n".join(_text(along, growth) for along, growth in found.items())
    show(found, text, as_json=options.json)
    return 0


def _grow(places: list[tuple[int, int, int]], repetitions: int) -> dict[str, Any]:
    runs: dict[str, Callable[[], object]] = {}
    for size, layers, microbatches in places:
        runs |= {f"{name} {size}": run for name, run in _work(layers, microbatches).items()}
    times = alternate(runs, repetitions)
    sizes = [size for size, _, _ in places]
    names = [key.rsplit(" ", 1)[0] for key in times][: len(times) // len(sizes)]
    seconds = {name: [times[f"{name} {size}"].median for size in sizes] for name in names}
    span = math.log(sizes[-1] / sizes[0])
    exponents = {name: math.log(values[-1] / values[0]) / span for name, values in seconds.items()}
    return {"sizes": sizes, "seconds": seconds, "exponent": exponents}


def _work(num_layers: int, num_microbatches: int) -> dict[str, Callable[[], object]]:
    shape = ChunkShape.of(["moe"] * num_layers)
    schedule = schedules.combined_1f1b(shape, num_microbatches)
    text = str(schedule)
    costs = CostModel.simple(computation=1e-3, communication=1e-3)
    chunk = ChunkPlan.of(
        [LayerPlan.build(torch.nn.Identity(), nodes={Slot.MLP: TrivialNode}) for _ in range(num_layers)]
    )
    own = schedules.serial(chunk.shape, num_microbatches)
    rules = Rules.of(chunk.shape, num_microbatches)
    batches = [torch.ones(4, 4, requires_grad=True) for _ in range(num_microbatches)]
    runner = Runner("inline")
    return {
        "parse": lambda: Schedule.parse(text),
        "print": lambda: str(Schedule(schedule.steps)),
        "validate": lambda: validate(schedule, shape, num_microbatches),
        "compile": lambda: compile_steps(own.steps, rules, [chunk] * num_microbatches),
        "simulate": lambda: simulate(schedule, costs),
        "run": lambda: runner.run(own, chunk, batches),
    }


def _text(along: str, growth: Mapping[str, Any]) -> str:
    columns = [f"ms, by {along}", *map(str, growth["sizes"]), "exponent"]
    rows = [
        (name, *(1e3 * value for value in values), growth["exponent"][name])
        for name, values in growth["seconds"].items()
    ]
    return table(columns, rows)


def _plot(found: Mapping[str, Any], path: Path) -> None:
    from matplotlib.figure import Figure  # noqa: PLC0415  # an extra that only pictures need

    figure = Figure(figsize=(9, 4), layout="constrained")
    for axes, (along, growth) in zip(figure.subplots(1, 2, sharey=True), found.items(), strict=True):
        for (name, values), marker in zip(growth["seconds"].items(), "osD^vx", strict=True):
            axes.loglog(growth["sizes"], values, marker=marker, label=name)
        axes.set_xlabel(along)
        axes.set_xticks(growth["sizes"], [str(size) for size in growth["sizes"]])
        axes.minorticks_off()
        axes.grid(alpha=0.3)
    figure.axes[0].set_ylabel("seconds")
    figure.axes[0].legend()
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    sys.exit(main())
