"""The model: a small byte-level ``GPTModel`` of Megatron-Core, with its local layer specs (no Transformer Engine)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_mtp_block_spec
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.nn import Module

from layernodes.demo.data import VOCABULARY_SIZE
from layernodes.demo.settings import NUM_HEADS, SEQUENCE_LENGTH, DemoSettings


def build_model(settings: DemoSettings, *, num_ranks: int, device: torch.device) -> GPTModel:
    """Build the model with seeded weights; its experts are spread over ``num_ranks`` ranks.

    Dropout and the routers' auxiliary loss are on, as in training.
    """
    seed_everything(settings.seed)
    config = _make_config(settings, num_ranks)
    block = get_gpt_decoder_block_spec(config, use_transformer_engine=False)
    mtp = get_gpt_mtp_block_spec(config, block, use_transformer_engine=False) if settings.mtp else None
    model = GPTModel(
        config=config,
        transformer_layer_spec=block,
        vocab_size=VOCABULARY_SIZE,
        max_sequence_length=SEQUENCE_LENGTH,
        position_embedding_type="rope",
        mtp_block_spec=mtp,
    )
    return model.to(device).train()


def seed_everything(seed: int) -> None:
    """Seed torch's generators and Megatron-Core's RNG tracker."""
    torch.manual_seed(seed)
    model_parallel_cuda_manual_seed(seed, force_reset_rng=True)


def layers_of(model: GPTModel) -> Sequence[Module]:
    """The layers in the order in which a schedule plan runs them: decoder, then multi-token prediction."""
    mtp = getattr(model, "mtp", None)
    return [*model.decoder.layers, *(mtp.layers if mtp is not None else ())]


def _make_config(settings: DemoSettings, num_ranks: int) -> TransformerConfig:
    moe_layers = [1] * settings.layers
    if settings.dense_last:
        moe_layers[-1] = 0
    dropout = 0.0 if settings.no_dropout else 0.1
    return TransformerConfig(
        num_layers=settings.layers,
        hidden_size=settings.hidden,
        num_attention_heads=NUM_HEADS,
        ffn_hidden_size=4 * settings.hidden,
        add_bias_linear=False,
        hidden_dropout=dropout,
        attention_dropout=dropout,
        num_moe_experts=settings.experts,
        moe_layer_freq=moe_layers,
        moe_ffn_hidden_size=2 * settings.hidden,
        moe_router_topk=settings.topk,
        moe_router_pre_softmax=settings.topk == 1,  # Megatron-Core wants it so
        moe_router_load_balancing_type="aux_loss",
        moe_aux_loss_coeff=1e-2,
        moe_token_dispatcher_type="alltoall",
        mtp_num_layers=settings.mtp or None,
        expert_model_parallel_size=num_ranks,
        # What needs a GPU or Transformer Engine is off.
        use_cpu_initialization=True,
        bias_dropout_fusion=False,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
        gradient_accumulation_fusion=False,
    )
