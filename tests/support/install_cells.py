"""Hypothesis strategy for the property of ``install()``: random configurations at random shapes, at EP=1 or EP=2."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.support.configs import Cell


@st.composite
def install_cells(draw: st.DrawFn, *, ep: int = 1) -> Cell:
    """A random configuration of ``ep`` ranks."""
    heads = draw(st.sampled_from([1, 2, 4]))
    local_experts = draw(st.integers(1, 5))
    topk = draw(st.integers(1, min(local_experts * ep, 6)))
    dispatcher = draw(st.sampled_from(["alltoall", "allgather", "flex"]))
    config: dict[str, Any] = {
        "num_attention_heads": heads,
        "num_query_groups": draw(st.sampled_from([heads, max(heads // 2, 1)])),
        "hidden_size": heads * draw(st.sampled_from([4, 6, 8, 16])),
        "ffn_hidden_size": draw(st.integers(4, 48)),
        "moe_ffn_hidden_size": draw(st.integers(4, 32)),
        "moe_token_dispatcher_type": dispatcher,
        "moe_router_topk": topk,
        "moe_router_pre_softmax": topk == 1 or draw(st.booleans()),
        "hidden_dropout": draw(st.sampled_from([0.0, 0.2])),
        "attention_dropout": draw(st.sampled_from([0.0, 0.2])),
        "normalization": draw(st.sampled_from(["LayerNorm", "RMSNorm"])),
        "moe_grouped_gemm": draw(st.booleans()),
    }
    if dispatcher == "flex":
        # DeepEP refuses a group of one rank.
        backend = draw(st.sampled_from(["deepep", "hybridep"])) if ep > 1 else "hybridep"
        config |= {"moe_flex_dispatcher_backend": backend, "moe_router_dtype": "fp32"}
    if draw(st.booleans()):
        config |= {"moe_shared_expert_intermediate_size": 24, "moe_shared_expert_gate": draw(st.booleans())}
        config["moe_shared_expert_overlap"] = dispatcher != "allgather" and draw(st.booleans())
    if draw(st.booleans()):
        config |= {"moe_router_load_balancing_type": draw(st.sampled_from(["aux_loss", "seq_aux_loss"]))}
        config["moe_aux_loss_coeff"] = 1e-2
    if draw(st.booleans()):
        modules = ["layernorm", "core_attn"]
        if config["moe_grouped_gemm"]:
            modules.append("moe_act")
        config |= {"recompute_granularity": "selective", "recompute_modules": modules}
    layers = draw(st.lists(st.sampled_from("MD"), min_size=1, max_size=3).map("".join))
    # Slot by slot over two microbatches, dropout draws in another order than the plain model.
    draws = config["hidden_dropout"] + config["attention_dropout"] > 0
    orders = draw(st.sampled_from([("serial",), ("1f1b",), ("serial",) if draws else ("paired",)]))
    return Cell(
        name="drawn",
        ep=ep,
        layers=layers if "M" in layers else layers + "M",
        local_experts=local_experts,
        mtp=draw(st.sampled_from([0, 0, 1, 2])) if draw(st.booleans()) else 0,
        config=config,
        tied=draw(st.booleans()),
        final_norm=draw(st.booleans()),
        padding=draw(st.booleans()),
        labels=draw(st.booleans()),
        uneven=draw(st.booleans()),
        frozen=draw(st.sampled_from([(), (), ("embedding",), ("router",), ("self_attention",)])),
        seq=draw(st.integers(2, 9)),
        batch=draw(st.integers(1, 3)),
        num_microbatches=draw(st.integers(1, 3)),
        orders=orders,
        seed=draw(st.integers(0, 2**16)),
    )


def draw_cells(count: int, *, ep: int) -> list[Cell]:
    """``count`` cells, the same at each call, for worker processes that run them all in one group."""
    found: dict[str, Cell] = {}

    @settings(
        max_examples=count,
        database=None,
        derandomize=True,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(install_cells(ep=ep))
    def note(cell: Cell) -> None:
        found[f"drawn-{len(found)}"] = cell

    note()
    return [replace(cell, name=name) for name, cell in found.items()]
