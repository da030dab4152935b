"""What the demonstration is asked to do, and whether that makes sense."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from pydantic import BaseModel, ConfigDict

from layernodes.command import UsageError

NUM_HEADS: Final = 4
SEQUENCE_LENGTH: Final = 128
BATCH_SIZE: Final = 2


class DemoSettings(BaseModel):
    """The arguments of ``layernodes demo``.

    Attributes:
        text: file whose bytes are the tokens; None for the text that the package ships.
        layers: decoder layers. hidden: hidden size. experts: routed experts of a MoE layer, over all ranks.
        topk: experts that each token goes to.
        microbatches: microbatches, each of ``BATCH_SIZE`` sequences of ``SEQUENCE_LENGTH`` bytes on every rank.
        mtp: multi-token-prediction layers. dense_last: make the last decoder layer dense.
        seed: seed of the weights and of dropout. no_dropout: leave dropout out.
    """

    model_config = ConfigDict(frozen=True)

    text: Path | None = None
    layers: int = 4
    hidden: int = 64
    experts: int = 8
    topk: int = 2
    microbatches: int = 4
    mtp: int = 0
    dense_last: bool = False
    seed: int = 1234
    no_dropout: bool = False


def check_settings(settings: DemoSettings, *, num_ranks: int) -> None:
    """Raise UsageError for the first thing that does not fit, in terms of the command's arguments."""
    for name in ("layers", "hidden", "experts", "topk", "microbatches"):
        if getattr(settings, name) < 1:
            raise UsageError(f"--{name} is {getattr(settings, name)}; it must be at least 1")
    if settings.mtp < 0:
        raise UsageError(f"--mtp is {settings.mtp}; give 0 or more")
    if settings.hidden % (2 * NUM_HEADS):
        raise UsageError(
            f"--hidden is {settings.hidden}; it must be a multiple of {2 * NUM_HEADS}: "
            f"{NUM_HEADS} attention heads, each of even size"
        )
    if settings.topk > settings.experts:
        raise UsageError(
            f"--topk is {settings.topk}, but there are only {settings.experts} experts; lower --topk or raise --experts"
        )
    if settings.experts % num_ranks:
        raise UsageError(
            f"--experts is {settings.experts}, which {num_ranks} ranks cannot share evenly; "
            f"make it a multiple of {num_ranks}"
        )
    if settings.dense_last and settings.layers == 1:
        raise UsageError("--dense-last leaves no MoE layer where --layers is 1; use --layers 2 or more")
    if not 0 <= settings.seed < 2**32:
        raise UsageError(f"--seed is {settings.seed}; it must be from 0 to {2**32 - 1}")
