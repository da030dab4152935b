"""Reasons why a step is foreign; ``test_validate`` has the others."""

from __future__ import annotations

import pytest

from layernodes.plan.explain import explain_foreign
from layernodes.plan.rules import Rules
from layernodes.plan.shape import ChunkShape
from layernodes.plan.step import Step

SHAPE = ChunkShape.of(["moe", "dense"], wgrad=["mlp"], post_process=False)


@pytest.mark.parametrize(
    ("text", "reasons"),
    [
        ("F2.L0.mlp", ["foreign: of microbatch 2; num_microbatches is 2, numbered 0 to 1"]),
        ("B0.L2.mlp", ["foreign: the chunk has 2 layers, numbered 0 to 1"]),
        ("F2.L0.attn", ["foreign: of microbatch 2", "unknown_slot: layer 0 has"]),
        ("F0.post_process", ["foreign: this chunk has no post_process"]),
        ("F0.postprocess", ["unknown_slot: the ends of this chunk are pre_process"]),
        ("W0.pre_process", ["unexpected: the ends of a chunk have no W"]),
        ("W0.L0.moe_dispatch", ["unexpected: layer 0 defers mlp only"]),
        ("W0.L1.moe_dispatch", ["unexpected: layer 1 does nothing in moe_dispatch"]),
    ],
)
def test_reasons(text: str, reasons: list[str]) -> None:
    """One violation for each thing that is wrong with the step, at its position."""
    found = explain_foreign(Step.parse(text), 7, Rules.of(SHAPE, 2))
    assert len(found) == len(reasons)
    for violation, reason in zip(found, reasons, strict=True):
        rule, words = reason.split(": ", 1)
        assert violation.rule == rule
        assert words in violation.message
        assert (violation.step, violation.position) == (text, 7)
        assert violation.message.startswith(f"{text} at step 7 ")


def test_nothing_there() -> None:
    """No microbatches, no layers, no ends."""
    empty = ChunkShape(pre_process=False, post_process=False)
    (violation,) = explain_foreign(Step.parse("F0.x"), 0, Rules.of(empty, 1))
    assert "the ends of this chunk are none" in violation.message
    first, second = explain_foreign(Step.parse("F0.L0.x"), 0, Rules.of(empty, 0))
    assert "num_microbatches is 0" in first.message
    assert "the chunk has 0 layers" in second.message
