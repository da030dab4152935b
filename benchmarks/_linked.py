"""What the benchmarks over the limited link share: their options, the worker's half, and the model on each rank."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks._link import leave, two_ranks
from layernodes import ChunkPlan
from layernodes.demo.data import make_microbatches, read_text
from layernodes.demo.model import build_model
from layernodes.demo.runner_pass import batch_of
from layernodes.demo.settings import DemoSettings

Measure = Callable[[ChunkPlan, list[dict[str, Any]], argparse.Namespace], Any]
"""What a worker does, given the chunk, this rank's microbatches and the options."""


def link_parser(description: str | None, *, layers: int, hidden: int, microbatches: int) -> argparse.ArgumentParser:
    """A parser of the options that all have, with these defaults."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=layers)
    parser.add_argument("--hidden", type=int, default=hidden)
    parser.add_argument("--microbatches", type=int, default=microbatches)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    return parser


def passed_on(options: argparse.Namespace, *names: str) -> list[str]:
    """These options as a worker is given them."""
    return [text for name in names for text in (f"--{name}", str(getattr(options, name)))]


def work(options: argparse.Namespace, measure: Measure) -> int:
    """The worker's half: measure on this rank; what rank 0 finds goes to ``run_workers``."""
    with two_ranks(options.worker, options.folder):
        settings = DemoSettings(layers=options.layers, hidden=options.hidden, microbatches=options.microbatches)
        device = torch.device("cpu")
        chunk = ChunkPlan.build(build_model(settings, num_ranks=2, device=device), split_combine=True)
        text = read_text(None).content
        microbatches = make_microbatches(text, settings.microbatches, rank=options.worker, num_ranks=2, device=device)
        found = measure(chunk, [batch_of(microbatch) for microbatch in microbatches], options)
        if options.worker == 0:
            leave(options.folder, found)
    return 0
