"""Megatron-Core's own combined-1F1B training step on our nodes: ``get_forward_backward_func()`` under ``install()``
alone gives the plain run's losses, gradients and parameters."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from megatron.core.models.common.model_chunk_schedule_plan import TransformerLayerSchedulePlan
from megatron.core.models.gpt import GPTModel

from layernodes import LayerPlan
from tests.support.fixtures import MEGATRON_WORLD, megatron_world  # noqa: F401
from tests.support.ranks import values_on_ranks
from tests.support.training import Case, Trainer, Way, compare, compare_all

pytestmark = MEGATRON_WORLD

_WAYS = (Way(installed=True), Way(installed=True, wgrad="auto"))

_RECOMPUTE = {"recompute_granularity": "selective", "recompute_modules": ["layernorm", "core_attn"]}
_SHARED = {"moe_shared_expert_intermediate_size": 16}
_ONE = (
    Case(name="fp32"),
    Case(name="no DDP, dense last", layers="MD", ddp=None),
    Case(name="dense only, one microbatch", layers="DD", num_microbatches=1),
    Case(name="bf16, MTP, tied", bf16=True, mtp=1, tied=True),
    Case(name="two MTP layers, dense inner", layers="MD", mtp=2, ddp=None),
    Case(name="repeated MTP layer", mtp=2, tied=True, config={"mtp_use_repeated_layer": True}),
    Case(name="allgather, shared experts", config={"moe_token_dispatcher_type": "allgather", **_SHARED}),
    Case(name="recompute", config=_RECOMPUTE),
    Case(name="per token, masked, scaled", per_token=True, masked=True, loss_scale=8.0, mtp=1),
)
_TWO = (
    Case(name="EP=2, bf16", ep=2, bf16=True),
    Case(name="EP=2, MTP, tied, dense last", ep=2, layers="MD", mtp=1, tied=True, masked=True),
    Case(name="EP=2, overlapped shared experts", ep=2, config={**_SHARED, "moe_shared_expert_overlap": True}),
    Case(
        name="DP=2, distributed optimizer, gradients reduced meanwhile",
        ddp={"overlap_grad_reduce": True, "use_distributed_optimizer": True},
        bf16=True,
        mtp=1,
        tied=True,
    ),
)


@pytest.mark.parametrize("case", _ONE, ids=lambda case: case.name)
def test_one_process(case: Case) -> None:
    """EP=1, which Megatron-Core's own nodes do not survive; with and without ``delay_wgrad_compute``."""
    assert compare(case, _WAYS, 2) == []


def test_two_processes() -> None:
    """EP=2 and data parallelism."""
    found = values_on_ranks(f"{compare_all.__module__}:compare_all", [(case, 2) for case in _TWO], _WAYS, seconds=300.0)
    assert found == [[], []]


@pytest.mark.parametrize("wgrad", ["off", "auto"])
def test_it_is_the_combined_step_that_runs(wgrad: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each layer's forward runs beside the backward of the microbatch before, on nodes built once a layer; the model's
    own forward is not called. With ``delay_wgrad_compute`` an attention's weight waits for its layer's ``backward_dw``.
    """
    trainer = Trainer(Case(name="counted", ddp=None))
    first, last = (layer.self_attention.linear_qkv.weight for layer in trainer.chunks[0].decoder.layers)
    pairs: Counter[tuple[bool, bool]] = Counter()
    built: list[Any] = []
    own_run, own_build = TransformerLayerSchedulePlan.run, LayerPlan.build
    came_with_backward: list[bool] = []

    def run(f_layer: Any, b_layer: Any, **options: Any) -> Any:
        pairs[f_layer is not None, b_layer is not None] += 1
        before = None if first.grad is None else first.grad.clone()
        found = own_run(f_layer, b_layer, **options)
        if options.get("is_last_layer_in_bwd"):
            assert last.grad is not None
            came_with_backward.append(
                first.grad is not None and (before is None or not torch.equal(first.grad, before))
            )
        return found

    def build(layer: Any, **options: Any) -> LayerPlan:
        built.append(layer)
        return own_build(layer, **options)

    monkeypatch.setattr(TransformerLayerSchedulePlan, "run", staticmethod(run))
    monkeypatch.setattr(LayerPlan, "build", staticmethod(build))
    monkeypatch.setattr(GPTModel, "forward", None)
    trainer.run(Way(installed=True, wgrad=wgrad), 1)
    assert pairs == {(True, False): 2, (True, True): 2 * 3, (False, True): 2}
    assert len(built) == 2
    assert came_with_backward == [wgrad == "off"] * 4
