"""What a ``HybridModel`` needs on a CPU: a stack spec of local modules, and a mixer in place of the CUDA kernels."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_submodules
from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules
from megatron.core.ssm.mamba_layer import MambaLayer, MambaLayerSubmodules
from megatron.core.ssm.mlp_layer import MLPLayer
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.multi_token_prediction import (
    MultiTokenPredictionBlock,
    MultiTokenPredictionBlockSubmodules,
    MultiTokenPredictionLayer,
    MultiTokenPredictionLayerSubmodules,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import (
    MoETransformerLayer,
    TransformerLayer,
    TransformerLayerSubmodules,
)
from torch import Tensor

from tests.support.modules import OwnAttention, sequence_parallel_norm


class StandInMixer(MegatronModule):
    """``MambaMixer``'s constructor, call and result, with a decaying sum over the sequence for its kernels.

    Also a ``GatedDeltaNet``'s, which stands in the place of attention and is given attention's arguments.
    """

    def __init__(
        self, config: Any, d_model: int | None = None, *, layer_number: int, pg_collection: Any = None, **_: Any
    ) -> None:
        super().__init__(config)
        size = d_model or config.hidden_size
        common = {"config": config, "init_method": config.init_method, "bias": False, "tp_group": pg_collection.tp}
        self.in_proj = ColumnParallelLinear(size, 2 * size, gather_output=False, skip_bias_add=False, **common)
        self.out_proj = RowParallelLinear(size, size, input_is_parallel=True, skip_bias_add=True, **common)
        share = size // pg_collection.tp.size()
        self.decay = torch.nn.Parameter(torch.linspace(-1.0, 1.0, share))
        self.mix = torch.nn.Parameter(torch.eye(share) + 0.1)

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor | None = None, *, packed_seq_params: Any = None, **_: Any
    ) -> tuple[Tensor, Tensor | None]:
        """``[s, b, h]`` to the same, and the bias."""
        both, _bias = self.in_proj(hidden_states)
        values, gates = both.chunk(2, dim=-1)
        keep = torch.sigmoid(self.decay).to(values.dtype)
        starts = {0} if packed_seq_params is None else set(packed_seq_params.cu_seqlens_q.tolist())
        state, rows = torch.zeros_like(values[0]), []
        for position, row in enumerate(values):
            state = row if position in starts else keep * state + row
            rows.append(state)
        mixed = torch.stack(rows) @ self.mix.to(values.dtype)
        output: tuple[Tensor, Tensor | None] = self.out_proj(mixed * torch.nn.functional.silu(gates))
        return output


def stack_spec(config: TransformerConfig, core_attention: str = "local") -> ModuleSpec:
    """A stack of Megatron-Core's local modules, every layer symbol in it."""

    def whole(num_experts: int | None = None, mla: bool = False) -> TransformerLayerSubmodules:
        made = get_gpt_layer_local_submodules(
            num_experts=num_experts,
            qk_layernorm=config.qk_layernorm,
            multi_latent_attention=mla,
            normalization=config.normalization,
        )
        if core_attention == "own":
            made.self_attention.submodules.core_attention = OwnAttention
        if config.sequence_parallel:
            made.input_layernorm = made.pre_mlp_layernorm = sequence_parallel_norm
        return made

    dense, moe = whole(mla=bool(config.multi_latent_attention)), whole(config.num_moe_experts)
    norm: Any = sequence_parallel_norm if config.sequence_parallel else WrappedTorchNorm
    attention = _parts(dense, "input_layernorm", "self_attention", "self_attn_bda")
    delta = TransformerLayerSubmodules(
        input_layernorm=norm, self_attention=ModuleSpec(module=StandInMixer), self_attn_bda=get_bias_dropout_add
    )
    mixer = MambaLayerSubmodules(norm=norm, mixer=ModuleSpec(module=StandInMixer), mamba_bda=get_bias_dropout_add)
    mlp = ("pre_mlp_layernorm", "mlp", "mlp_bda")
    return ModuleSpec(
        module=HybridStack,
        submodules=HybridStackSubmodules(
            mamba_layer=ModuleSpec(module=MambaLayer, submodules=mixer),
            gdn_layer=ModuleSpec(module=TransformerLayer, submodules=delta),
            attention_layer=ModuleSpec(module=TransformerLayer, submodules=attention),
            mla_layer=ModuleSpec(module=TransformerLayer, submodules=attention),
            mlp_layer=ModuleSpec(module=MLPLayer, submodules=_parts(dense, *mlp)),
            moe_layer=ModuleSpec(module=MoETransformerLayer, submodules=_parts(moe, *mlp)),
            mtp_block_spec=_mtp_spec(norm),
        ),
    )


def _parts(whole: TransformerLayerSubmodules, *names: str) -> TransformerLayerSubmodules:
    chosen: Mapping[str, Any] = {name: getattr(whole, name) for name in names}
    return TransformerLayerSubmodules(**chosen)


def _mtp_spec(norm: Any) -> ModuleSpec:
    layer = MultiTokenPredictionLayerSubmodules(
        enorm=norm, hnorm=norm, layer_norm=norm, eh_proj=ColumnParallelLinear, mtp_model_layer=None
    )
    return ModuleSpec(
        module=MultiTokenPredictionBlock,
        submodules=MultiTokenPredictionBlockSubmodules(
            layer_specs=[ModuleSpec(module=MultiTokenPredictionLayer, submodules=layer)]
        ),
    )
