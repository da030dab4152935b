"""The arguments with which commands write down a chunk's shape, without a model."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

from layernodes.command import UsageError
from layernodes.plan.shape import ChunkShape


def add_shape_arguments(parser: ArgumentParser) -> None:
    """Declare ``--layers``, ``--mtp``, ``--wgrad``, ``--split-combine`` and ``--microbatches``."""
    parser.add_argument(
        "--layers",
        default="2",
        metavar="N|KINDS",
        help="number of MoE layers, or kinds such as moe,dense,moe (default: 2)",
    )
    parser.add_argument("--mtp", type=int, default=0, metavar="N", help="multi-token-prediction layers (default: 0)")
    parser.add_argument("--microbatches", type=int, default=2, metavar="M", help="microbatches (default: 2)")
    parser.add_argument("--wgrad", action="store_true", help="weight gradients are deferred: slots have W steps")
    parser.add_argument("--split-combine", action="store_true", help="what follows combine has a slot of its own")


def shape_of(options: Namespace) -> ChunkShape:
    """The shape among parsed options.

    Raises:
        UsageError: no number and no kinds of layers, or a negative number.
        PlanError: an unknown kind.
    """
    text: str = options.layers
    if text.lstrip("-").isdigit():
        if int(text) < 0:
            raise UsageError(f"--layers is {text}; give 0 or more, or kinds such as moe,dense,moe")
        kinds = ["moe"] * int(text)
    else:
        kinds = [kind.strip() for kind in text.split(",")]
    if options.microbatches < 1:
        raise UsageError(f"--microbatches is {options.microbatches}; give 1 or more")
    return ChunkShape.of(kinds, mtp=options.mtp, wgrad=options.wgrad, split_combine=options.split_combine)
