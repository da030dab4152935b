"""The cells of the matrix: one configuration each, small enough to run in a fraction of a second.

A cell is data. ``tests.support.build`` turns it into a model and its microbatches, ``tests.support.compare`` runs it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

Order = Literal["serial", "1f1b", "paired"]
"""How microbatches share the plan: one after the other; forward of one against backward of the one before; or all
forwards, then all backwards, slot by slot over the same layers (at least two in flight in each)."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One configuration of model, inputs and orders.

    Attributes:
        tp, ep, etp: tensor, expert and expert-tensor parallel sizes; the world has ``max(tp, ep * etp)`` ranks.
        layers: one letter a decoder layer, ``M`` for MoE and ``D`` for dense.
        pattern: the layer pattern of a ``HybridModel``, without its MTP part; empty: the model is a ``GPTModel``.
        mtp_pattern: the pattern inside each MTP layer of a ``HybridModel``.
        local_experts: experts a rank; the model has ``local_experts * ep``.
        final_norm: whether the decoder ends with a norm (where the chunk has the last layer).
        mtp: number of multi-token-prediction layers.
        config: overrides of ``TransformerConfig`` fields.
        late_config: fields set after the configuration was made, past its checks (which want bf16 and EP > 1).
        core_attention: Megatron's local one, or the suite's own, which also does MLA's head sizes and packed sequences.
        frozen: regular expressions of parameter names that do not require grad.
        idle_rank: whether the router sends all tokens to one expert (with a top-k of 1), so a rank receives none.
        padding: whether the batch carries a padding mask. labels: whether the model returns a loss (else logits).
        packed: lengths of the sequences packed into one row; empty for none.
        tokens_per_sample: ``PackedSeqParams.tokens_per_sample``.
        loss_mask: whether the batch carries a loss mask.
        uneven: whether every microbatch has a sequence length of its own.
    """

    name: str
    tp: int = 1
    ep: int = 1
    etp: int = 1
    layers: str = "MM"
    pattern: str = ""
    mtp_pattern: str = "*E"
    local_experts: int = 2
    mtp: int = 0
    config: Mapping[str, Any] = field(default_factory=dict)
    late_config: Mapping[str, Any] = field(default_factory=dict)
    core_attention: Literal["local", "own"] = "local"
    position: str = "rope"
    tied: bool = False
    final_norm: bool = True
    pre_process: bool = True
    post_process: bool = True
    frozen: tuple[str, ...] = ()
    idle_rank: bool = False
    padding: bool = False
    labels: bool = True
    loss_mask: bool = False
    packed: tuple[int, ...] = ()
    tokens_per_sample: int | None = None
    uneven: bool = False
    seq: int = 8
    batch: int = 2
    vocab: int = 64
    num_microbatches: int = 3
    orders: tuple[Order, ...] = ("serial", "1f1b")
    seed: int = 1234

    @property
    def world_size(self) -> int:
        """Ranks that the cell needs."""
        return max(self.tp, self.ep * self.etp)

    def with_config(self, **overrides: Any) -> Cell:
        """The same cell with further ``TransformerConfig`` overrides."""
        return replace(self, config={**self.config, **overrides})


def _cell(name: str, *, config: Mapping[str, Any] | None = None, **fields: Any) -> Cell:
    return Cell(name=name, config=dict(config or {}), **fields)


_MLA: Mapping[str, Any] = {
    "multi_latent_attention": True,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_head_dim": 8,
    "qk_pos_emb_head_dim": 8,
    "v_head_dim": 8,
    "rope_type": "yarn",
    "rotary_scaling_factor": 4.0,
}
_SHARED: Mapping[str, Any] = {"moe_shared_expert_intermediate_size": 24}
_AUX: Mapping[str, Any] = {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 1e-2}
_DROP_PAD: Mapping[str, Any] = {
    "moe_expert_capacity_factor": 1.0,
    "moe_pad_expert_input_to_capacity": True,
    "moe_token_drop_policy": "probs",
}
_BIAS: Mapping[str, Any] = {"moe_router_enable_expert_bias": True, "moe_router_score_function": "sigmoid"}
_DROPOUT: Mapping[str, Any] = {"hidden_dropout": 0.1, "attention_dropout": 0.1}
_GROUPED: Mapping[str, Any] = {"moe_grouped_gemm": True}
_TOP1: Mapping[str, Any] = {"moe_router_topk": 1, "moe_router_pre_softmax": True}
_OVERLAP: Mapping[str, Any] = {"overlap_moe_expert_parallel_comm": True}
_DELAY: Mapping[str, Any] = {**_OVERLAP, "delay_wgrad_compute": True}
_BF16: Mapping[str, Any] = {"bf16": True, "params_dtype": "bfloat16"}


def _recompute(*modules: str, **config: Any) -> dict[str, Any]:
    """Selective recompute; that of the expert activation exists for grouped experts only."""
    grouped = {"moe_grouped_gemm": "moe_act" in modules}
    return {"recompute_granularity": "selective", "recompute_modules": list(modules), **grouped, **config}


def _flex(backend: str = "deepep", **config: Any) -> dict[str, Any]:
    return {
        "moe_token_dispatcher_type": "flex",
        "moe_flex_dispatcher_backend": backend,
        "moe_router_dtype": "fp32",
        **config,
    }


def _dense_cells() -> Iterator[Cell]:
    yield _cell("dense", layers="DD")
    yield _cell("dense-dropout", layers="DD", config=_DROPOUT)
    yield _cell("dense-recompute-mlp-norm", layers="DD", config=_recompute("mlp", "layernorm", "core_attn"))
    yield _cell("dense-bf16", layers="DD", config=_BF16)
    yield _cell("dense-tied", layers="DD", tied=True)
    yield _cell("dense-linear-bias", layers="DD", config={"add_bias_linear": True, **_DROPOUT})
    yield _cell("dense-no-final-norm", layers="DD", final_norm=False)
    yield _cell("dense-first-chunk", layers="DD", post_process=False)
    yield _cell("dense-paired", layers="DD", num_microbatches=2, orders=("paired",))


def _moe_cells() -> Iterator[Cell]:
    """Cells that make sense for every dispatcher and every expert-parallel size."""
    yield _cell("moe")
    yield _cell("experts1", local_experts=1, config=_TOP1)
    yield _cell("experts4", local_experts=4, config={"moe_router_topk": 4})
    yield _cell("topk1", config=_TOP1)
    yield _cell("topk3", local_experts=4, config={"moe_router_topk": 3})
    yield _cell("shared", config=_SHARED)
    yield _cell("shared-gate", config={**_SHARED, "moe_shared_expert_gate": True})
    yield _cell("aux", config=_AUX)
    yield _cell("dropout", config=_DROPOUT)
    yield _cell("dense-last", layers="MD")
    yield _cell("dense-first", layers="DM")
    yield _cell("mtp", mtp=1)
    yield _cell("recompute-layernorm", config=_recompute("layernorm"))
    yield _cell("recompute-moe_act", config=_recompute("moe_act"))
    yield _cell("paired", num_microbatches=2, orders=("paired",))
    yield _cell("padding-aux", padding=True, config=_AUX)


def _paired_cells() -> Iterator[Cell]:
    """Tokens dropped; pairs of microbatches."""
    yield _cell("drop-pad", config=_DROP_PAD)
    yield _cell("drop-position", config={"moe_expert_capacity_factor": 1.0, "moe_token_drop_policy": "position"})
    yield _cell(
        "paired-experts1",
        num_microbatches=2,
        orders=("paired",),
        local_experts=1,
        config=_TOP1,
    )
    yield _cell("paired-shared", num_microbatches=2, orders=("paired",), config=_SHARED)
    yield _cell("paired-recompute", num_microbatches=2, orders=("paired",), config=_recompute("layernorm", "moe_act"))
    yield _cell("paired-uneven", num_microbatches=3, orders=("paired",), uneven=True)
    yield _cell("paired-mixed", num_microbatches=2, orders=("paired",), layers="DMD")
    yield _cell("paired-aux", num_microbatches=2, orders=("paired",), config=_AUX)
    yield _cell("paired-drop-pad", num_microbatches=2, orders=("paired",), config=_DROP_PAD)


def _routing_cells() -> Iterator[Cell]:
    """Shared experts, routers and their losses."""
    yield _cell("shared-overlap", config={**_SHARED, "moe_shared_expert_overlap": True})
    yield _cell("seq-aux", config={**_AUX, "moe_router_load_balancing_type": "seq_aux_loss"})
    yield _cell("global-aux", config={**_AUX, "moe_router_load_balancing_type": "global_aux_loss"})
    yield _cell(
        "two-aux",
        config={"moe_router_load_balancing_type": ["aux_loss", "seq_aux_loss"], "moe_aux_loss_coeff": [1e-2, 1e-3]},
    )
    yield _cell("sinkhorn", config={"moe_router_load_balancing_type": "sinkhorn", "moe_router_topk": 1})
    yield _cell("z-loss", config={"moe_z_loss_coeff": 1e-3})
    yield _cell("z-loss-padding", padding=True, config={"moe_z_loss_coeff": 1e-3})
    yield _cell("seq-aux-padding", padding=True, config={**_AUX, "moe_router_load_balancing_type": "seq_aux_loss"})
    yield _cell(
        "global-aux-padding", padding=True, config={**_AUX, "moe_router_load_balancing_type": "global_aux_loss"}
    )
    yield _cell("expert-bias", config=_BIAS)
    yield _cell("expert-bias-padding", padding=True, config=_BIAS)
    yield _cell("expert-bias-aux", config={**_BIAS, **_AUX})
    yield _cell("groups", local_experts=4, config={"moe_router_num_groups": 2, "moe_router_group_topk": 1})
    yield _cell(
        "sigmoid-scaled", config={"moe_router_score_function": "sigmoid", "moe_router_topk_scaling_factor": 2.5}
    )
    yield _cell("router-fp32", config={"moe_router_dtype": "fp32"})
    yield _cell("router-fp64", config={"moe_router_dtype": "fp64"})
    yield _cell("jitter", config={"moe_input_jitter_eps": 1e-2})
    yield _cell("force-balance", config={"moe_router_force_load_balancing": True})
    yield _cell(
        "weight-on-input",
        config={"moe_apply_probs_on_input": True, **_TOP1},
    )
    yield _cell("padding", padding=True)


def _model_cells() -> Iterator[Cell]:
    """Linear layers, attention, norms, positions and precisions; what the model returns."""
    yield _cell("linear-bias", config={**_GROUPED, "add_bias_linear": True})
    yield _cell("linear-bias-dropout", config={**_GROUPED, "add_bias_linear": True, **_GROUPED, **_DROPOUT})
    yield _cell("qkv-bias", config={"add_qkv_bias": True})
    yield _cell("swiglu", config={"gated_linear_unit": True, "activation_func": "silu"})
    yield _cell("gqa", config={"num_query_groups": 2})
    yield _cell("qk-norm", config={"qk_layernorm": True})
    yield _cell("rmsnorm", config={"normalization": "RMSNorm"})
    yield _cell("learned", position="learned_absolute")
    yield _cell("learned-dropout", position="learned_absolute", config=_DROPOUT)
    yield _cell("no-position", position="none")
    yield _cell("bf16", config=_BF16)
    yield _cell("bf16-dropout-shared", config={**_BF16, **_DROPOUT, **_SHARED})
    yield _cell("no-final-norm", final_norm=False)
    yield _cell("post-norm", config={"apply_residual_connection_post_layernorm": True})
    yield _cell("logits", labels=False)
    yield _cell("loss-mask", loss_mask=True)
    yield _cell("tied", tied=True)


def _size_cells() -> Iterator[Cell]:
    """Numbers of layers and microbatches; parts of a pipeline."""
    yield _cell("mixed", layers="DMDM")
    yield _cell("mixed-dense-last-no-norm", layers="MD", final_norm=False)
    yield _cell("one-layer", layers="M")
    yield _cell("four-layers", layers="MMMM")
    yield _cell("five-microbatches", num_microbatches=5)
    yield _cell("uneven", uneven=True)
    yield _cell("first-chunk", post_process=False)
    yield _cell("middle-chunk", pre_process=False, post_process=False)
    yield _cell("last-chunk", pre_process=False)
    yield _cell("last-chunk-dense-last", layers="MD", pre_process=False)
    yield _cell("middle-chunk-dense", layers="DMD", pre_process=False, post_process=False)
    yield _cell("last-chunk-logits", pre_process=False, labels=False)
    yield _cell("last-chunk-padding", pre_process=False, padding=True, config=_AUX)


def _frozen_cells() -> Iterator[Cell]:
    """Parameters that do not train."""
    yield _cell("frozen-embedding", frozen=("embedding",))
    yield _cell("frozen-router", frozen=("router",))
    yield _cell("frozen-experts", frozen=(r"mlp\.experts",))
    yield _cell("frozen-attention", frozen=("self_attention",))
    yield _cell("frozen-first-layer", frozen=("embedding", r"layers\.0\."))
    yield _cell("frozen-all-but-router", frozen=(r"^(?!.*router).*$",))
    yield _cell("frozen-norms", frozen=("layernorm",))
    yield _cell("frozen-output", frozen=("output_layer",))


def _recompute_cells() -> Iterator[Cell]:
    """Activations computed anew."""
    yield _cell("recompute-core_attn", config=_recompute("core_attn"))
    yield _cell("recompute-core_attn-dropout", config=_recompute("core_attn", **_DROPOUT))
    yield _cell("recompute-shared", config=_recompute("shared_experts", **_SHARED))
    yield _cell("recompute-mlp", layers="DM", config=_recompute("mlp"))
    yield _cell(
        "recompute-all",
        layers="MDM",
        config=_recompute("layernorm", "core_attn", "moe_act", "shared_experts", "mlp", **_SHARED),
    )
    yield _cell(
        "recompute-all-dropout",
        config=_recompute("layernorm", "core_attn", "moe_act", "shared_experts", **_SHARED, **_DROPOUT),
    )
    yield _cell("recompute-moe", config=_recompute("moe"))
    yield _cell("recompute-layernorm-dense-last", layers="MD", config=_recompute("layernorm"))


def _attention_cells() -> Iterator[Cell]:
    """Latent experts, latent attention, packed sequences."""
    yield _cell("latent", config={"moe_latent_size": 16})
    yield _cell("latent-shared", config={"moe_latent_size": 16, **_SHARED})
    yield _cell("latent-bias-dropout", config={"moe_latent_size": 16, "add_bias_linear": True, **_GROUPED, **_DROPOUT})
    yield _cell("mla", core_attention="own", config=_MLA)
    yield _cell("mla-rope", core_attention="own", config={**_MLA, "rope_type": "rope"})
    yield _cell("mla-no-q-lora", core_attention="own", config={**_MLA, "q_lora_rank": None})
    yield _cell("mla-qk-norm", core_attention="own", config={**_MLA, "qk_layernorm": True})
    yield _cell("mla-recompute", core_attention="own", config=_recompute("mla_up_proj", **_MLA))
    yield _cell(
        "mla-recompute-all",
        core_attention="own",
        config=_recompute("mla_up_proj", "layernorm", "core_attn", "moe_act", **_MLA, qk_layernorm=True),
    )
    yield _cell("own-attention", core_attention="own")
    yield _cell("packed", core_attention="own", batch=1, seq=12, packed=(5, 4, 3))
    yield _cell("packed-dropout", core_attention="own", batch=1, seq=12, packed=(5, 4, 3), config=_DROPOUT)
    yield _cell(
        "packed-aux-padding", core_attention="own", batch=1, seq=12, packed=(5, 4, 3), padding=True, config=_AUX
    )
    yield _cell(
        "packed-samples",
        core_attention="own",
        batch=1,
        seq=12,
        packed=(6, 6),
        tokens_per_sample=6,
        config={**_AUX, "moe_router_load_balancing_type": "seq_aux_loss"},
    )
    yield _cell("packed-dense", layers="MD", core_attention="own", batch=1, seq=12, packed=(5, 7))


def _option_cells() -> Iterator[Cell]:
    """Options of Megatron-Core's overlap, chunked and grouped experts; everything at once."""
    yield _cell("mlp-chunks", layers="DM", config={"mlp_chunks_for_training": 2})
    yield _cell("batch1-seq1", batch=1, seq=1)
    yield _cell("early-attention-release", late_config={**_OVERLAP, "ep_overlap_early_attn_memory_release": True})
    yield _cell("delay-wgrad", late_config=_DELAY)
    yield _cell("delay-wgrad-mixed", layers="DMD", config=_SHARED, late_config=_DELAY)
    yield _cell("grouped", config=_GROUPED)
    yield _cell("grouped-swiglu", config={**_GROUPED, "gated_linear_unit": True, "activation_func": "silu"})
    yield _cell("grouped-experts1", local_experts=1, config={**_GROUPED, **_TOP1})
    yield _cell(
        "heterogeneous-everything",
        layers="DMMD",
        tied=True,
        padding=True,
        loss_mask=True,
        config=_recompute(
            "layernorm",
            "core_attn",
            "moe_act",
            **_SHARED,
            **_AUX,
            **_DROPOUT,
            num_query_groups=2,
            normalization="RMSNorm",
            gated_linear_unit=True,
            activation_func="silu",
        ),
    )


def _feature_cells() -> Iterator[Cell]:
    """One feature each, over the all-to-all dispatcher."""
    yield from _paired_cells()
    yield from _routing_cells()
    yield from _model_cells()
    yield from _size_cells()
    yield from _frozen_cells()
    yield from _recompute_cells()
    yield from _attention_cells()
    yield from _option_cells()


def _mtp_cells() -> Iterator[Cell]:
    yield _cell("mtp-aux", mtp=1, config=_AUX)
    yield _cell("mtp-padding-aux", mtp=1, padding=True, config=_AUX)
    yield _cell("mtp-padding", mtp=1, padding=True)
    yield _cell("mtp-tied", mtp=1, tied=True)
    yield _cell("mtp-dropout", mtp=1, config=_DROPOUT)
    yield _cell("mtp-shared-recompute", mtp=1, config=_recompute("layernorm", "moe_act", "shared_experts", **_SHARED))
    yield _cell("mtp-detach-heads", mtp=1, config={"mtp_detach_heads": True})
    yield _cell("mtp-logits", mtp=1, labels=False)
    yield _cell("mtp-dense-inner", mtp=1, layers="MD")
    yield _cell("mtp-two", mtp=2)
    yield _cell("mtp-repeated", mtp=2, config={"mtp_use_repeated_layer": True})
    yield _cell("mtp-last-chunk", mtp=1, pre_process=False)
    yield _cell("mtp-packed", mtp=1, core_attention="own", batch=1, seq=12, packed=(5, 4, 3))
    yield _cell("mtp-loss-mask", mtp=1, loss_mask=True)
    yield _cell("mtp-bf16", mtp=1, config=_BF16)
    yield _cell("mtp-latent", mtp=1, config={"moe_latent_size": 16})
    yield _cell("mtp-mla", mtp=1, core_attention="own", config=_MLA)
    yield _cell("mtp-frozen-embedding", mtp=1, frozen=("embedding",))
    yield _cell("mtp-paired", mtp=1, num_microbatches=2, orders=("paired",))
    yield _cell("mtp-learned", mtp=1, position="learned_absolute")


def _flex_cells() -> Iterator[Cell]:
    for backend in ("deepep", "hybridep"):
        base = _flex(backend)
        yield _cell(backend, config=base)
        yield _cell(
            f"{backend}-experts1",
            local_experts=1,
            config={**base, **_TOP1},
        )
        yield _cell(f"{backend}-experts4-topk3", local_experts=4, config={**base, "moe_router_topk": 3})
        yield _cell(f"{backend}-shared-aux", config={**base, **_SHARED, **_AUX})
        yield _cell(f"{backend}-mtp", mtp=1, config=base)
        yield _cell(f"{backend}-dense-last", layers="MD", config=base)
        yield _cell(f"{backend}-recompute", config={**base, **_recompute("layernorm", "moe_act")})
        yield _cell(f"{backend}-dropout", config={**base, **_DROPOUT})
        yield _cell(f"{backend}-bf16", config={**base, **_BF16})
        yield _cell(f"{backend}-latent", config={**base, "moe_latent_size": 16})
        yield _cell(f"{backend}-paired", num_microbatches=2, orders=("paired",), config=base)


def _tensor_parallel_cells() -> Iterator[Cell]:
    """Two ranks that share a layer: TP=2, with and without sequence parallel, experts split or whole."""
    sequence = {"sequence_parallel": True}
    for dispatcher in ("alltoall", "allgather"):
        config = {"moe_token_dispatcher_type": dispatcher}
        for label, ep, etp in (("ep2-etp1", 2, 1), ("ep1-etp2", 1, 2)):
            name = f"tp2-{label}-{dispatcher}"
            yield _cell(name, tp=2, ep=ep, etp=etp, config={**config, **sequence})
            yield _cell(f"{name}-dropout", tp=2, ep=ep, etp=etp, config={**config, **sequence, **_DROPOUT})
            yield _cell(f"{name}-shared-aux", tp=2, ep=ep, etp=etp, config={**config, **sequence, **_SHARED, **_AUX})
            yield _cell(
                f"{name}-paired",
                tp=2,
                ep=ep,
                etp=etp,
                num_microbatches=2,
                orders=("paired",),
                config={**config, **sequence},
            )
    base = {"tp": 2, "ep": 2, "config": sequence}
    yield _cell("tp2-jitter", **{**base, "config": {**sequence, "moe_input_jitter_eps": 1e-2}})
    yield _cell("tp2-mtp", mtp=1, **base)
    yield _cell("tp2-mtp-dropout", mtp=1, **{**base, "config": {**sequence, **_DROPOUT}})
    yield _cell("tp2-dense-last", layers="MD", **base)
    yield _cell("tp2-padding-aux", padding=True, **{**base, "config": {**sequence, **_AUX}})
    yield _cell(
        "tp2-recompute",
        **{**base, "config": {**sequence, **_recompute("layernorm", "moe_act", "core_attn"), **_DROPOUT}},
    )
    yield _cell("tp2-middle-chunk", pre_process=False, post_process=False, **base)
    yield _cell("tp2-dense", layers="DD", tp=2, config=sequence)
    yield _cell("tp2-dense-no-sp", layers="DD", tp=2)
    yield _cell("tp2-dense-dropout", layers="DD", tp=2, config={**sequence, **_DROPOUT})


def _expand(cells: Iterator[Cell], **config: Any) -> Iterator[Cell]:
    """Each cell at EP=1 and EP=2, named so."""
    for cell in cells:
        for ep in (1, 2):
            yield replace(cell, name=f"{cell.name}-ep{ep}", ep=ep).with_config(**config)


def _all_cells() -> Iterator[Cell]:
    yield from _dense_cells()
    for dispatcher in ("alltoall", "allgather"):
        for cell in _expand(_moe_cells(), moe_token_dispatcher_type=dispatcher):
            yield replace(cell, name=f"{dispatcher}-{cell.name}")
    yield from _expand(_feature_cells())
    yield from _expand(_mtp_cells())
    # DeepEP refuses a group of one rank.
    yield from (cell for cell in _expand(_flex_cells()) if cell.ep > 1 or not cell.name.startswith("deepep"))
    yield from _tensor_parallel_cells()
    yield _cell("idle-rank", ep=2, idle_rank=True, config=_TOP1)
    yield _cell(
        "idle-rank-allgather",
        ep=2,
        idle_rank=True,
        config={"moe_token_dispatcher_type": "allgather", **_TOP1},
    )
    yield _cell("idle-rank-deepep", ep=2, idle_rank=True, config=_flex(**_TOP1))
    yield _cell("idle-rank-mtp", ep=2, mtp=1, idle_rank=True, config=_TOP1)


CELLS: tuple[Cell, ...] = tuple(_all_cells())
"""All cells, each with a name of its own."""


def by_name(name: str) -> Cell:
    """The cell called ``name``."""
    return next(cell for cell in CELLS if cell.name == name)
