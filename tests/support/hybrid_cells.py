"""Cells of hybrid models: some by name, one feature each, and random ones."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

from hypothesis import strategies as st

from tests.support.cells import cells
from tests.support.configs import Cell

_AUX: Final = {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 1e-2}
_DROPOUT: Final = {"hidden_dropout": 0.1, "attention_dropout": 0.1}
_FULL: Final = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
_MLA: Final = {
    "multi_latent_attention": True,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_head_dim": 8,
    "qk_pos_emb_head_dim": 4,
    "v_head_dim": 8,
}
_YARN: Final = {
    "yarn_rotary_scaling_factor": 2.0,
    "yarn_original_max_position_embeddings": 8,
    "yarn_beta_fast": 32.0,
    "yarn_beta_slow": 1.0,
    "yarn_mscale": 1.0,
    "yarn_mscale_all_dim": 0.0,
    "yarn_correction_range_round_to_int": True,
}


def hybrid_cell(pattern: str, **fields: Any) -> Cell:
    """A cell of a ``HybridModel`` with this layer pattern."""
    count = len(pattern.split("|", maxsplit=1)[0])
    return Cell(**{"name": pattern, "layers": "M" * max(count, 1), "pattern": pattern, **fields})


FEATURES: Final[dict[str, Cell]] = {
    "attention-moe": hybrid_cell("*E"),
    "every-kind": hybrid_cell("M*EG-"),
    "ends-with-attention": hybrid_cell("E*"),
    "ends-with-mixer": hybrid_cell("-EM"),
    "padding-aux": hybrid_cell("*EME", padding=True, config=_AUX),
    "packed": hybrid_cell("M*EG-", core_attention="own", batch=1, seq=12, packed=(5, 4, 3)),
    "packed-samples": hybrid_cell(
        "*E", core_attention="own", batch=1, seq=12, packed=(6, 6), tokens_per_sample=6, padding=True, config=_AUX
    ),
    "learned": hybrid_cell("*E", position="learned_absolute"),
    "no-position": hybrid_cell("M*E", position="none"),
    "yarn": hybrid_cell("*E", position="yarn", late_config=_YARN),
    "logits": hybrid_cell("*E-", labels=False),
    "tied": hybrid_cell("*E-", tied=True),
    "bf16": hybrid_cell("M*E-", config={"bf16": True, "params_dtype": "bfloat16"}),
    "dropout": hybrid_cell("M*E-", config=_DROPOUT),
    "mla": hybrid_cell("+E-", core_attention="own", config=_MLA),
    "shared-latent": hybrid_cell("*E", config={"moe_shared_expert_intermediate_size": 24, "moe_latent_size": 16}),
    "allgather": hybrid_cell("*E", config={"moe_token_dispatcher_type": "allgather"}),
    "recompute": hybrid_cell(
        "M*E-", config={"recompute_granularity": "selective", "recompute_modules": ["layernorm", "core_attn", "mlp"]}
    ),
    "recompute-full": hybrid_cell("M*E-", config=_FULL),
    "recompute-full-mtp": hybrid_cell("*E", mtp=1, config=_FULL),
    "mup": hybrid_cell("*E", mtp=1, config={"use_mup": True, "mup_base_hidden_size": 16}),
    "fp32-residual": hybrid_cell("M*E-", config={"fp32_residual_connection": True}),
    "qk-norm-rms": hybrid_cell("*E-", config={"qk_layernorm": True, "normalization": "RMSNorm"}),
    "chunks": hybrid_cell("*E-", config={"mlp_chunks_for_training": 2}),
    "no-final-norm": hybrid_cell("*E", final_norm=False),
    "first-chunk": hybrid_cell("M*E", post_process=False),
    "middle-chunk": hybrid_cell("E-*", pre_process=False, post_process=False),
    "last-chunk": hybrid_cell("*EM", pre_process=False),
    "empty-whole": hybrid_cell("|"),
    "empty-middle": hybrid_cell("|", pre_process=False, post_process=False),
    "empty-last-mtp": hybrid_cell("|", pre_process=False, mtp=1),
    "mtp": hybrid_cell("M*E", mtp=1, loss_mask=True),
    "mtp-two-tied": hybrid_cell("*E", mtp=2, mtp_pattern="*-E-", tied=True),
    "mtp-repeated": hybrid_cell("*E", mtp=2, config={"mtp_use_repeated_layer": True}),
    "mtp-padding": hybrid_cell("*E", mtp=1, padding=True, mtp_pattern="M*E"),
    "mtp-no-experts": hybrid_cell("*-", mtp=1, mtp_pattern="M*-"),
    "mtp-last-chunk": hybrid_cell("E*", mtp=1, mtp_pattern="E*", pre_process=False),
    "frozen": hybrid_cell("M*E-", frozen=("embedding", "mixer")),
}
"""One feature each."""

TWO_RANKS: Final[dict[str, Cell]] = {
    "ep2": hybrid_cell("M*E-*E", ep=2),
    "ep2-mtp-aux": hybrid_cell("*E", ep=2, mtp=1, tied=True, padding=True),
    "ep2-allgather": hybrid_cell("*E-", ep=2, config={"moe_token_dispatcher_type": "allgather"}),
    "tp2": hybrid_cell("M*E-", tp=2, ep=2, config={"sequence_parallel": True}),
    "tp2-dropout": hybrid_cell("M*E-", tp=2, ep=2, mtp=1, config={"sequence_parallel": True, **_DROPOUT}),
    "tp2-dense": hybrid_cell("M*-", tp=2),
}
"""Two ranks: experts on both, or every layer on both."""


@st.composite
def hybrid_cells(draw: st.DrawFn, *, max_microbatches: int = 3) -> Cell:
    """Patterns of 1 to 5 layers over attention, experts, MLP and mixers; features as for GPT models."""
    cell: Cell = draw(cells(max_microbatches=max_microbatches))
    pattern = draw(st.text("*E-M", min_size=1, max_size=5))
    config = {**cell.config}
    if "moe_router_load_balancing_type" not in config:  # it was drawn without experts
        config |= {"moe_token_dispatcher_type": "alltoall"}
    if config.get("moe_router_topk", 2) == 1 and not config.get("moe_router_pre_softmax"):
        del config["moe_router_topk"]
    if cell.mtp:  # decoder and MTP layers of one number add their losses in one place of the tracker
        config |= {"moe_router_load_balancing_type": "none", "moe_aux_loss_coeff": 0.0}
        config.pop("moe_z_loss_coeff", None)
    return replace(
        cell,
        layers="M" * len(pattern),
        pattern=pattern,
        mtp_pattern=draw(st.sampled_from(["*E", "E", "*-", "M*E-", "-EM", "*"])),
        config=config,
        local_experts=max(cell.local_experts, 2),
    )
