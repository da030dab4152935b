"""What the plain model cannot do without is missed in a batch at once; what it can do without may be left out."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from layernodes import BatchError, Runner, schedules
from tests.support import runs
from tests.support.build import Microbatch
from tests.support.configs import Cell
from tests.support.fixtures import MEGATRON_WORLD, megatron_world  # noqa: F401
from tests.support.hybrid_cells import FEATURES
from tests.support.runs import Bench

pytestmark = MEGATRON_WORLD

_MROPE = {"mrope_section": [2, 1, 1]}
_CELLS = {
    "rope": Cell(name="rope", layers="M"),
    "learned": Cell(name="learned", layers="D", position="learned_absolute"),
    "none": Cell(name="none", layers="D", position="none"),
    "mrope": Cell(name="mrope", layers="D", position="mrope", config=_MROPE),
    "middle-mrope": Cell(
        name="middle-mrope", layers="D", position="mrope", config=_MROPE, pre_process=False, post_process=False
    ),
    "middle": Cell(name="middle", layers="D", position="learned_absolute", pre_process=False, post_process=False),
    "last": Cell(name="last", layers="D", position="learned_absolute", pre_process=False),
    "mtp": Cell(name="mtp", layers="M", mtp=1),
    "mtp-learned": Cell(name="mtp-learned", layers="D", mtp=1, position="learned_absolute"),
    "last-mtp": Cell(name="last-mtp", layers="M", mtp=1, pre_process=False),
    "last-mtp-learned": Cell(
        name="last-mtp-learned", layers="D", mtp=1, pre_process=False, position="learned_absolute"
    ),
    "hybrid": replace(FEATURES["attention-moe"], name="hybrid"),
    "hybrid-learned": replace(FEATURES["attention-moe"], name="hybrid-learned", position="learned_absolute"),
}
_NAMES = ("input_ids", "position_ids", "attention_mask", "labels", "loss_mask")
_NEEDED = {
    "rope": "input_ids",
    "learned": "input_ids position_ids",
    "none": "input_ids",
    "mrope": "input_ids position_ids",
    "middle-mrope": "position_ids",
    "middle": "",
    "last": "",
    "mtp": "input_ids",
    "mtp-learned": "input_ids position_ids",
    "last-mtp": "input_ids",
    "last-mtp-learned": "input_ids position_ids",
    "hybrid": "input_ids",
    "hybrid-learned": "input_ids position_ids",
}
"""Written down from Megatron-Core's source; the test compares them with what its models do."""


def _bench(name: str, monkeypatch: pytest.MonkeyPatch) -> Bench:
    cell = replace(_CELLS[name], num_microbatches=1)
    if cell.position == "mrope":
        made = runs.make_microbatches

        def in_three_directions(cell: Cell) -> list[Microbatch]:
            return [
                replace(m, inputs={**m.inputs, "position_ids": m.inputs["position_ids"].expand(3, -1, -1).contiguous()})
                for m in made(cell)
            ]

        monkeypatch.setattr(runs, "make_microbatches", in_three_directions)
    return Bench(cell)


def _plainly(bench: Bench, batch: dict[str, Any]) -> Tensor | None:
    """The plain model's output; None where it fails."""
    bench.reset()
    arguments = dict(batch)
    if "hidden_states" in arguments:
        bench.model.set_input_tensor(arguments.pop("hidden_states").detach())
    try:
        output: Tensor = bench.model(**{**dict.fromkeys(_NAMES), **arguments})
    except Exception:
        return None
    return output.detach()


@pytest.mark.parametrize("name", _CELLS)
def test_what_may_be_left_out_is_what_the_plain_model_takes_none_for(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Left out or None, one argument at a time."""
    bench = _bench(name, monkeypatch)
    chunk = bench.chunk()
    whole = bench.batches()[0]
    refused = []
    for missing in _NAMES:
        without = {key: value for key, value in whole.items() if key != missing}
        expected = _plainly(bench, without)
        for batch in (without, {**without, missing: None}):
            bench.reset()
            if expected is None:
                with pytest.raises(BatchError, match=f"the batch has no {missing}"):
                    chunk.open(batch)
                continue
            with Runner(streams="inline") as runner:
                result = runner.run(schedules.serial(chunk.shape, 1), chunk, [batch])
            assert torch.equal(result.outputs[0], expected), missing
        refused += [missing] if expected is None else []
    assert " ".join(refused) == _NEEDED[name]


@pytest.mark.parametrize("name", ["rope", "hybrid"])
def test_hidden_states_are_not_for_a_chunk_that_embeds(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They would be ignored, and their gradient lost."""
    bench = _bench(name, monkeypatch)
    batch = bench.batches()[0]
    with pytest.raises(BatchError, match="takes no hidden_states; give decoder_input"):
        bench.chunk().open({**batch, "hidden_states": torch.zeros(8, 2, 32)})
    bench.chunk().open({**batch, "hidden_states": None})
