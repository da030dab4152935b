"""From a cell to a seeded ``GPTModel`` or ``HybridModel`` and its microbatches."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_submodules, get_gpt_mtp_block_spec
from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec_for_backend
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel.utils import set_streams
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.multi_token_prediction import MTPLossAutoScaler, MTPLossLoggingHelper
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor

from tests.support.configs import Cell
from tests.support.hybrid import stack_spec
from tests.support.modules import GroupedSpecProvider, OwnAttention, sequence_parallel_norm

_BASE: Mapping[str, Any] = {
    "hidden_size": 32,
    "num_attention_heads": 4,
    "ffn_hidden_size": 48,
    "use_cpu_initialization": True,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "add_bias_linear": False,
    "bias_dropout_fusion": False,
    "masked_softmax_fusion": False,
    "bias_activation_fusion": False,
    "apply_rope_fusion": False,
    "persist_layer_norm": False,
    "gradient_accumulation_fusion": False,
    "moe_token_dispatcher_type": "alltoall",
    "moe_router_load_balancing_type": "none",
    "moe_aux_loss_coeff": 0.0,
}
_ACTIVATIONS = {"silu": torch.nn.functional.silu}


@dataclass(frozen=True, kw_only=True)
class Microbatch:
    """Keyword arguments of ``model.forward``, the input of a chunk without pre-process, and the output's gradient."""

    inputs: Mapping[str, Any]
    hidden_states: Tensor | None
    output_grad: Tensor


def make_config(cell: Cell) -> TransformerConfig:
    """The cell's ``TransformerConfig``."""
    values = {**_BASE, "num_layers": len(cell.layers), **cell.config}
    values |= {"tensor_model_parallel_size": cell.tp, "expert_model_parallel_size": cell.ep}
    values["expert_tensor_parallel_size"] = cell.etp
    if "M" in cell.layers:
        values["num_moe_experts"] = cell.local_experts * cell.ep
        values.setdefault("moe_ffn_hidden_size", 24)
        values["moe_layer_freq"] = [int(letter == "M") for letter in cell.layers]
    if cell.mtp:
        values |= {"mtp_num_layers": cell.mtp, "mtp_loss_scaling_factor": 0.1}
    if isinstance(values.get("activation_func"), str):
        values["activation_func"] = _ACTIVATIONS[values["activation_func"]]
    values["params_dtype"] = _dtype(values)
    config_class = MLATransformerConfig if values.get("multi_latent_attention") else TransformerConfig
    config = config_class(**values)
    for name, value in cell.late_config.items():
        setattr(config, name, value)
    return config


def _dtype(config: Mapping[str, Any]) -> torch.dtype:
    found = config.get("params_dtype", torch.float32)
    return getattr(torch, found) if isinstance(found, str) else found  # type: ignore[no-any-return]


def make_model(cell: Cell) -> GPTModel | HybridModel:
    """A model with the cell's seeded weights; all global state of Megatron is reset and seeded first.

    Two calls for one cell give equal weights and leave equal generator and tracker states.
    """
    reset_globals(cell.seed)
    config = make_config(cell)
    ends = {"pre_process": cell.pre_process, "post_process": cell.post_process}
    common = {
        "config": config,
        "vocab_size": cell.vocab,
        "max_sequence_length": 64,
        "position_embedding_type": cell.position,
        "share_embeddings_and_output_weights": cell.tied,
        **ends,
    }
    model = _make_hybrid(cell, common) if cell.pattern else _make_gpt(cell, common)
    if config.params_dtype is not torch.float32:
        # Megatron's Float16Module does this; norms and embeddings are created in fp32.
        model.to(config.params_dtype)
    _break_symmetry(model, cell)
    return model.train()


def _make_hybrid(cell: Cell, common: Mapping[str, Any]) -> HybridModel:
    spec = stack_spec(common["config"], cell.core_attention)
    if not cell.final_norm:
        spec.params = {"post_layer_norm": False}
    pattern = "/".join([cell.pattern, *[cell.mtp_pattern] * cell.mtp])
    return HybridModel(hybrid_stack_spec=spec, hybrid_layer_pattern=pattern, **common)


def _make_gpt(cell: Cell, common: Mapping[str, Any]) -> GPTModel:
    config = common["config"]
    layer_specs = [_layer_spec(cell, config, is_moe=letter == "M") for letter in cell.layers]
    norm = sequence_parallel_norm if config.sequence_parallel else WrappedTorchNorm
    block = TransformerBlockSubmodules(layer_specs=layer_specs, layer_norm=norm if cell.final_norm else None)
    mtp = get_gpt_mtp_block_spec(config, block, use_transformer_engine=False) if cell.mtp else None
    if mtp is not None and config.sequence_parallel:
        _tolerate_sequence_parallel(mtp)
    return GPTModel(transformer_layer_spec=block, mtp_block_spec=mtp, **common)


def reset_globals(seed: int) -> None:
    """Seed generators and RNG tracker, empty the metric trackers, set the loss scales.

    The global memory buffer goes too: a plan that frees by name can leave it without storage, and the next model that
    gathers into it would fail for no fault of its own.
    """
    set_streams()
    parallel_state.get_global_memory_buffer().buffer.clear()
    torch.manual_seed(seed)
    model_parallel_cuda_manual_seed(seed, force_reset_rng=True)
    get_moe_metrics_tracker().metrics.clear()
    MTPLossLoggingHelper.tracker.clear()
    MoEAuxLossAutoScaler.main_loss_backward_scale = torch.tensor(0.5)
    MTPLossAutoScaler.main_loss_backward_scale = torch.tensor(0.5)


def make_microbatches(cell: Cell) -> list[Microbatch]:
    """The cell's microbatches: equal on the ranks of one tensor-parallel group, different on all others."""
    rank = parallel_state.get_data_parallel_rank()
    generator = torch.Generator().manual_seed(cell.seed * 1000 + rank)
    return [_microbatch(cell, index, generator) for index in range(cell.num_microbatches)]


def moved(microbatch: Microbatch, device: str) -> Microbatch:
    """The same microbatch on a device."""

    def move(value: Any) -> Any:
        if isinstance(value, PackedSeqParams):
            return replace(value, **{field.name: move(getattr(value, field.name)) for field in fields(value)})
        return value.to(device) if isinstance(value, Tensor) else value

    hidden = microbatch.hidden_states
    return Microbatch(
        inputs={name: move(value) for name, value in microbatch.inputs.items()},
        hidden_states=None if hidden is None else hidden.detach().to(device).requires_grad_(hidden.requires_grad),
        output_grad=microbatch.output_grad.to(device),
    )


def _microbatch(cell: Cell, index: int, generator: torch.Generator) -> Microbatch:
    seq = cell.seq + (2 * index if cell.uneven else 0)
    shape = (cell.batch, seq)
    inputs: dict[str, Any] = {
        "input_ids": torch.randint(cell.vocab, shape, generator=generator),
        "position_ids": torch.arange(seq).expand(shape).contiguous(),
        "attention_mask": None,
    }
    labels = torch.randint(cell.vocab, shape, generator=generator)
    if cell.labels and cell.post_process:
        inputs["labels"] = labels
    if cell.padding:
        inputs["padding_mask"] = _padding_mask(shape, generator)
    if cell.loss_mask or (cell.mtp and cell.labels):
        inputs["loss_mask"] = (torch.rand(shape, generator=generator) > 0.2).float()
    if cell.packed:
        inputs["packed_seq_params"] = _packed(cell)
    dtype = _dtype(cell.config)
    parts = cell.tp if cell.config.get("sequence_parallel") else 1
    hidden_shape = (seq // parts, cell.batch, cell.config.get("hidden_size", _BASE["hidden_size"]))
    hidden = None
    if not cell.pre_process:
        hidden = torch.randn(hidden_shape, generator=generator, dtype=dtype).requires_grad_()
    return Microbatch(
        inputs=inputs, hidden_states=hidden, output_grad=_output_grad(cell, shape, hidden_shape, dtype, generator)
    )


def _output_grad(
    cell: Cell, shape: tuple[int, int], hidden_shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator
) -> Tensor:
    """A gradient in the shape of the chunk's output: hidden states, losses or (vocabulary-parallel) logits."""
    if not cell.post_process:
        return torch.randn(hidden_shape, generator=generator, dtype=dtype)
    if cell.labels:
        return torch.rand(shape, generator=generator)
    return torch.randn((*shape, cell.vocab // cell.tp), generator=generator, dtype=dtype)


def _padding_mask(shape: tuple[int, int], generator: torch.Generator) -> Tensor:
    """True where padded: the tail of each row, of a different length each, never the whole row."""
    lengths = torch.randint(shape[1] // 2, shape[1], (shape[0], 1), generator=generator)
    return torch.arange(shape[1])[None] >= lengths


def _packed(cell: Cell) -> PackedSeqParams:
    bounds = torch.tensor([0, *cell.packed]).cumsum(0).to(torch.int32)
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=bounds,
        cu_seqlens_kv=bounds,
        max_seqlen_q=max(cell.packed),
        max_seqlen_kv=max(cell.packed),
        tokens_per_sample=cell.tokens_per_sample,
    )


def _layer_spec(cell: Cell, config: TransformerConfig, *, is_moe: bool) -> ModuleSpec:
    submodules = get_gpt_layer_local_submodules(
        num_experts=config.num_moe_experts if is_moe else None,
        qk_layernorm=config.qk_layernorm,
        multi_latent_attention=config.multi_latent_attention,
        normalization=config.normalization,
    )
    if is_moe and config.moe_grouped_gemm:
        submodules.mlp = get_moe_module_spec_for_backend(
            GroupedSpecProvider(), num_experts=config.num_moe_experts, moe_grouped_gemm=True
        )
    if cell.core_attention == "own":
        submodules.self_attention.submodules.core_attention = OwnAttention
    if config.sequence_parallel:
        for name in ("input_layernorm", "pre_mlp_layernorm"):
            if getattr(submodules, name) is not IdentityOp:
                setattr(submodules, name, sequence_parallel_norm)
    return ModuleSpec(module=TransformerLayer, submodules=submodules)


def _tolerate_sequence_parallel(mtp: Any) -> None:
    for spec in mtp.layer_specs:
        for name in ("enorm", "hnorm", "layer_norm"):
            setattr(spec.submodules, name, sequence_parallel_norm)


@torch.no_grad()
def _break_symmetry(model: GPTModel | HybridModel, cell: Cell) -> None:
    """Freeze what the cell freezes, and make every parameter matter.

    Norm weights start at one and biases at zero, where many mistakes do not show.
    """
    generator = torch.Generator().manual_seed(cell.seed)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            parameter.add_(torch.empty_like(parameter, dtype=torch.float32).normal_(0, 0.1, generator=generator))
        elif "router" in name:
            # Megatron's initial router is so small that all experts get nearly the same probability.
            parameter.copy_(torch.empty_like(parameter, dtype=torch.float32).normal_(0, 0.3, generator=generator))
        if any(re.search(pattern, name) for pattern in cell.frozen):
            parameter.requires_grad_(False)
    if cell.idle_rank:
        for name, parameter in model.named_parameters():
            if "router.weight" in name:
                # All logits are zero: of equal ones top-k takes the same expert for every token.
                parameter.zero_()
