"""Further cells, chosen to break the nodes rather than to cover features one by one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from tests.support.configs import Cell, by_name

_SHARED: dict[str, Any] = {"moe_shared_expert_intermediate_size": 24}
_OVERLAP: dict[str, Any] = {**_SHARED, "moe_shared_expert_overlap": True}
_GATE: dict[str, Any] = {"moe_shared_expert_gate": True}
_DROPOUT: dict[str, Any] = {"hidden_dropout": 0.1, "attention_dropout": 0.1}
_AUX: dict[str, Any] = {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 1e-2}


def _overlap_cells() -> Iterator[Cell]:
    """Shared experts that the plain model overlaps with its exchange."""
    for name in ("deepep-ep2", "hybridep-ep1", "hybridep-ep2", "alltoall-moe-ep1", "alltoall-moe-ep2"):
        cell = by_name(name)
        yield replace(cell, name=f"{name}-overlap").with_config(**_OVERLAP)
        yield replace(cell, name=f"{name}-overlap-gate").with_config(**_OVERLAP, **_GATE)
        yield replace(cell, name=f"{name}-overlap-paired", num_microbatches=2, orders=("paired",)).with_config(
            **_OVERLAP, **_GATE
        )
    cell = by_name("shared-overlap-ep2")
    recompute = {"recompute_granularity": "selective", "recompute_modules": ["layernorm", "shared_experts"]}
    yield replace(cell, name="overlap-recompute").with_config(**recompute)
    yield replace(cell, name="overlap-dropout-dense-last", layers="MD").with_config(**_DROPOUT)
    yield replace(cell, name="overlap-mtp", mtp=1)
    yield replace(cell, name="overlap-bf16").with_config(bf16=True, params_dtype="bfloat16")
    yield replace(cell, name="overlap-frozen-shared", frozen=("shared_experts",))
    yield replace(cell, name="overlap-frozen-routed", frozen=(r"mlp\.experts", "router"))


def _full_recompute_cells() -> Iterator[Cell]:
    for method in ("uniform", "block"):
        full = {"recompute_granularity": "full", "recompute_method": method, "recompute_num_layers": 1}
        for name in ("alltoall-moe-ep1", "alltoall-moe-ep2", "alltoall-dropout-ep2", "dense-dropout", "mixed-ep2"):
            yield replace(by_name(name), name=f"full-{method}-{name}").with_config(**full)
        yield replace(by_name("alltoall-aux-ep2"), name=f"full-{method}-aux").with_config(**full)
        yield replace(by_name("expert-bias-ep2"), name=f"full-{method}-expert-bias").with_config(**full)
        yield replace(by_name("z-loss-ep2"), name=f"full-{method}-z-loss").with_config(**full)
        if method == "uniform":
            yield replace(by_name("mtp-aux-ep2"), name="full-uniform-mtp").with_config(**full)
        yield replace(by_name("alltoall-paired-ep2"), name=f"full-{method}-paired").with_config(**full)


def _chunk_cells() -> Iterator[Cell]:
    """``mlp_chunks_for_training`` over MoE layers."""
    for name in (
        "alltoall-shared-gate-ep1",
        "alltoall-shared-gate-ep2",
        "allgather-shared-ep2",
        "hybridep-shared-aux-ep2",
    ):
        yield replace(by_name(name), name=f"chunks-{name}").with_config(mlp_chunks_for_training=3)
    cell = by_name("shared-overlap-ep2")
    yield replace(cell, name="chunks-overlap").with_config(mlp_chunks_for_training=2)
    yield replace(by_name("alltoall-padding-aux-ep2"), name="chunks-padding").with_config(mlp_chunks_for_training=2)
    yield replace(by_name("recompute-all-ep2"), name="chunks-recompute").with_config(mlp_chunks_for_training=2)
    yield replace(by_name("paired-shared-ep2"), name="chunks-paired").with_config(mlp_chunks_for_training=2)
    yield replace(by_name("mtp-aux-ep2"), name="chunks-mtp").with_config(mlp_chunks_for_training=2)
    yield replace(by_name("jitter-ep2"), name="chunks-jitter").with_config(mlp_chunks_for_training=2)
    yield replace(by_name("batch1-seq1-ep2"), name="chunks-seq1").with_config(mlp_chunks_for_training=4)
    yield replace(by_name("alltoall-padding-aux-ep2"), name="chunks-seq1-padding", seq=1, batch=3).with_config(
        mlp_chunks_for_training=2
    )
    yield replace(by_name("drop-pad-ep2"), name="chunks-drop-pad").with_config(mlp_chunks_for_training=2)
    yield replace(by_name("latent-shared-ep2"), name="chunks-latent").with_config(mlp_chunks_for_training=2)


def _mtp_cells() -> Iterator[Cell]:
    yield replace(by_name("mtp-tied-ep2"), name="mtp-tied-four", num_microbatches=4)
    yield replace(by_name("mtp-two-ep2"), name="mtp-two-tied-four", tied=True, num_microbatches=4)
    yield replace(by_name("mtp-repeated-ep2"), name="mtp-repeated-tied-four", tied=True, num_microbatches=4)
    yield replace(by_name("mtp-two-ep2"), name="mtp-two-padding", padding=True).with_config(**_AUX)
    yield replace(by_name("mtp-two-ep2"), name="mtp-two-detach", num_microbatches=4).with_config(mtp_detach_heads=True)
    yield replace(by_name("mtp-repeated-ep2"), name="mtp-repeated-detach").with_config(mtp_detach_heads=True)
    yield replace(by_name("mtp-repeated-ep2"), name="mtp-repeated-paired", num_microbatches=2, orders=("paired",))
    yield replace(by_name("mtp-tied-ep2"), name="mtp-tied-paired", num_microbatches=3, orders=("paired",))
    yield replace(
        by_name("mtp-two-ep2"), name="mtp-three-rmsnorm", mtp=3, batch=1, tied=True, orders=("1f1b",)
    ).with_config(normalization="RMSNorm")
    yield replace(by_name("mtp-repeated-ep2"), name="mtp-repeated-rmsnorm", mtp=3).with_config(normalization="RMSNorm")
    yield replace(by_name("mtp-repeated-ep2"), name="mtp-repeated-rmsnorm-paired", orders=("paired",)).with_config(
        normalization="RMSNorm"
    )
    yield replace(by_name("mtp-two-ep2"), name="mtp-two-dense-inner", layers="MD")
    yield replace(by_name("mtp-repeated-ep2"), name="mtp-repeated-dense", layers="D")
    yield replace(by_name("mtp-tied-ep2"), name="mtp-tied-frozen", frozen=("embedding",))
    yield replace(by_name("mtp-two-ep2"), name="mtp-two-last-chunk", pre_process=False)
    yield replace(by_name("mtp-two-ep2"), name="mtp-two-batch1", batch=1)
    yield replace(by_name("mtp-last-chunk-ep2"), name="mtp-last-chunk-tied", tied=True)
    yield replace(by_name("mtp-two-ep2"), name="mtp-two-frozen-mtp", frozen=(r"mtp\.",))
    yield replace(by_name("mtp-two-ep2"), name="mtp-two-logits", labels=False)
    yield replace(by_name("tp2-mtp"), name="tp2-mtp-two-tied", mtp=2, tied=True, num_microbatches=4)
    yield replace(by_name("tp2-mtp-dropout"), name="tp2-mtp-repeated-dropout", mtp=2).with_config(
        mtp_use_repeated_layer=True
    )


def _combined_cells() -> Iterator[Cell]:
    yield replace(by_name("allgather-paired-ep2"), name="allgather-paired-shared", num_microbatches=3).with_config(
        **_SHARED, **_GATE
    )
    yield replace(by_name("allgather-mtp-ep2"), name="allgather-mtp-paired", num_microbatches=2, orders=("paired",))
    yield replace(by_name("allgather-paired-ep2"), name="allgather-paired-recompute").with_config(
        recompute_granularity="selective", recompute_modules=["layernorm", "core_attn"]
    )
    yield replace(by_name("paired-recompute-ep2"), name="paired-recompute-shared", num_microbatches=3).with_config(
        **_OVERLAP
    )
    yield replace(by_name("mla-recompute-all-ep2"), name="paired-mla-recompute", num_microbatches=2, orders=("paired",))
    yield replace(by_name("deepep-paired-ep2"), name="deepep-paired-dense", layers="DMD", num_microbatches=3)
    yield replace(by_name("drop-pad-ep2"), name="drop-pad-experts1", local_experts=1).with_config(
        moe_router_topk=1, moe_router_pre_softmax=True
    )
    yield replace(by_name("drop-pad-ep2"), name="drop-pad-weight-on-input").with_config(
        moe_apply_probs_on_input=True, moe_router_topk=1, moe_router_pre_softmax=True
    )
    yield replace(by_name("padding-ep2"), name="padding-dense", layers="DD")
    yield replace(by_name("uneven-ep2"), name="uneven-aux-padding", padding=True).with_config(**_AUX)
    yield replace(by_name("alltoall-moe-ep2"), name="fp32-residual").with_config(
        bf16=True, params_dtype="bfloat16", fp32_residual_connection=True
    )
    yield replace(by_name("alltoall-moe-ep2"), name="frozen-everything-but-embedding", frozen=(r"^(?!.*embedding).*$",))
    yield replace(by_name("alltoall-moe-ep2"), name="frozen-everything-but-output", frozen=(r"^(?!.*output_layer).*$",))
    yield replace(
        by_name("alltoall-moe-ep2"), name="frozen-first-whole-layer-shared", frozen=("embedding", r"layers\.0\.")
    ).with_config(**_SHARED, **_GATE)
    yield replace(
        by_name("mixed-ep2"), name="frozen-three-layers", frozen=("embedding", r"layers\.[012]\.")
    ).with_config(**_DROPOUT)
    yield replace(by_name("recompute-all-ep2"), name="frozen-recompute", frozen=("embedding", "router", "layernorm"))
    yield replace(by_name("deepep-ep2"), name="deepep-frozen-router", frozen=("embedding", "router"))
    yield replace(by_name("alltoall-moe-ep2"), name="batch1", batch=1)
    yield replace(by_name("middle-chunk-ep2"), name="middle-chunk-frozen", frozen=(r"layers\.0\.",))
    yield replace(by_name("latent-shared-ep2"), name="latent-delay-wgrad").with_config()
    yield replace(by_name("deepep-ep2"), name="deepep-drop-pad").with_config(
        moe_expert_capacity_factor=1.0, moe_token_drop_policy="probs"
    )
    yield replace(
        by_name("alltoall-moe-ep2"), name="force-balance-paired", num_microbatches=3, orders=("paired",)
    ).with_config(**_AUX, moe_router_topk=2)
    yield replace(by_name("paired-uneven-ep2"), name="paired-uneven-drop", num_microbatches=3).with_config(
        moe_expert_capacity_factor=1.0, moe_token_drop_policy="probs"
    )


FURTHER: tuple[Cell, ...] = (
    *_overlap_cells(),
    *_full_recompute_cells(),
    *_chunk_cells(),
    *_mtp_cells(),
    *_combined_cells(),
)
"""All further cells, each with a name of its own."""
