"""A small byte-level MoE model for Megatron-Core: processes, model, data. Nothing here knows of layernodes."""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from bytes_hybrid import build_hybrid, num_layers
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_mtp_block_spec
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn import Module

VOCABULARY = 256


def join_processes(options: Namespace) -> None:
    """Join the processes that ``torchrun`` started, or be the only one, and make Megatron-Core's groups."""
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    if "RANK" in os.environ:
        if backend == "nccl":
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel(
        pipeline_model_parallel_size=options.pp,
        virtual_pipeline_model_parallel_size=options.vpp,
        expert_model_parallel_size=options.ep,
        create_gloo_process_groups=False,
    )
    torch.manual_seed(options.seed)
    model_parallel_cuda_manual_seed(options.seed)


def make_config(options: Namespace) -> TransformerConfig:
    """A usual Megatron-Core configuration; what needs a GPU or Transformer Engine is off."""
    dtype = torch.bfloat16 if options.bf16 else torch.float32
    return TransformerConfig(
        num_layers=num_layers(options) if options.model == "hybrid" else options.layers,
        hidden_size=options.hidden,
        num_attention_heads=4,
        ffn_hidden_size=4 * options.hidden,
        normalization="RMSNorm",
        add_bias_linear=False,
        hidden_dropout=options.dropout,
        attention_dropout=options.dropout,
        num_moe_experts=options.experts,
        moe_ffn_hidden_size=2 * options.hidden,
        moe_router_topk=2,
        moe_router_load_balancing_type="aux_loss",
        moe_aux_loss_coeff=1e-2,
        moe_token_dispatcher_type="alltoall",
        mtp_num_layers=1 if options.mtp else None,
        pipeline_model_parallel_size=options.pp,
        virtual_pipeline_model_parallel_size=options.vpp,
        expert_model_parallel_size=options.ep,
        overlap_p2p_comm=options.pp > 1,
        batch_p2p_comm=options.pp == 1,
        pipeline_dtype=dtype,
        params_dtype=dtype,
        bf16=options.bf16,
        use_cpu_initialization=True,
        bias_dropout_fusion=False,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
        gradient_accumulation_fusion=False,
    )


def build_chunks(options: Namespace, config: TransformerConfig) -> list[Module]:
    """This rank's model chunks: one, or one for each virtual pipeline stage."""
    return [_build_chunk(options, config, stage) for stage in (range(options.vpp) if options.vpp else [None])]


def _build_chunk(options: Namespace, config: TransformerConfig, vp_stage: int | None) -> Module:
    arguments: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "max_sequence_length": options.seq,
        "pre_process": parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage),
        "post_process": parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage),
        "position_embedding_type": "rope",
        "share_embeddings_and_output_weights": options.tied,
        "vp_stage": vp_stage,
    }
    build = build_hybrid if options.model == "hybrid" else _build_gpt
    model: Module = build(config, options, **arguments).to(torch.cuda.current_device())
    return Float16Module(config, model.bfloat16()) if options.bf16 else model


def _build_gpt(config: TransformerConfig, options: Namespace, **arguments: Any) -> GPTModel:
    stage = arguments["vp_stage"]
    block = get_gpt_decoder_block_spec(config, use_transformer_engine=False, vp_stage=stage)
    mtp = None
    if options.mtp:
        mtp = get_gpt_mtp_block_spec(config, block, use_transformer_engine=False, vp_stage=stage)
    return GPTModel(config=config, transformer_layer_spec=block, mtp_block_spec=mtp, **arguments)


def batches(text: bytes, options: Namespace, step: int) -> Iterator[dict[str, Tensor]]:
    """The microbatches of a step: stretches of the text from places drawn from seed, step and data-parallel rank."""
    content = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    rank = parallel_state.get_data_parallel_rank()
    generator = torch.Generator().manual_seed(((options.seed * 100_003) + step) * 1009 + rank)
    device: Any = torch.cuda.current_device()
    for _ in range(options.microbatches):
        starts = torch.randint(len(content) - options.seq, (options.batch,), generator=generator)
        rows = torch.stack([content[start : start + options.seq + 1] for start in starts.tolist()]).to(device)
        positions = torch.arange(options.seq, device=device).expand(options.batch, -1).contiguous()
        yield {"tokens": rows[:, :-1].contiguous(), "positions": positions, "labels": rows[:, 1:].contiguous()}
