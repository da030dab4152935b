"""Costs of published models on published hardware, from FLOPs and bytes.

Every number of a model is its authors'; every rate is the vendor's or a published measurement; the rest are stated
assumptions. For T tokens a microbatch on one GPU, no tensor parallelism, bfloat16::

    compute seconds    = FLOPs / (peak FLOP/s x efficiency) + bytes of elementwise work / memory bandwidth
    linear layer       F = B = W = 2 x parameters x T FLOPs
    core attention     F = T x S / 2 x heads x 2 x (d_qk + d_v) FLOPs (causal), B = 2.5 F (recomputes scores), no W
    routed experts     top-k x T rows of 3 x hidden x expert FLOPs x 2, load balanced
    all-to-all         T x copies x hidden x 2 bytes / bandwidth + latency, forward and backward, both directions
      copies           places x (1 - (1 - 1/places)^k) distinct destinations expected of k choices, no more than
                       the model's limit, of which (places - 1) / places are elsewhere; a place is a node where the
                       group spans nodes (one copy a node crosses the network, as with DeepEP), else a GPU
    activation bytes   inputs of the linear layers, queries, keys, values and attention output, no recomputation
    wgrad bytes        inputs and output gradients of the linear layers of the slot

Slots are those of the nodes: attention, router and shared experts are ``pre_dispatch_computation``, and the norm at the
end of a multi-token-prediction layer is ``mtp_post_process``. Costs go by kind, and such a layer is of kind ``"moe"``:
its projection of 2 x hidden to hidden, which its ``pre_dispatch_computation`` runs too, and its head, which
``post_process`` runs, are in no cost. Where they matter, add the one to ``layers`` of a copy, the other to ``ends``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Final, final

from pydantic import Field

from layernodes.errors import CostError, PlanError
from layernodes.plan.arguments import check_argument
from layernodes.plan.costs import FREE, CostModel, SlotCost
from layernodes.plan.hardware import H100, Hardware
from layernodes.plan.shape import ChunkShape
from layernodes.plan.strict_model import StrictModel
from layernodes.slots import POST_PROCESS, PRE_PROCESS, Slot

_BYTES: Final = 2  # of a bfloat16
Count = Annotated[int, Field(ge=0)]


@final
class Preset(StrictModel):
    """The shape of a published model.

    Attributes:
        name: the model.
        source: where its numbers come from.
        num_layers: decoder layers, of which the first ``num_dense`` have a dense MLP.
        hidden: hidden size.
        heads, kv_heads: attention heads, and those of keys and values.
        qk_dim, v_dim: size of a head's query and key, and of its value.
        q_rank, kv_rank, rope_dim: ranks of multi-head latent attention and its rotary part; 0: plain attention.
        dense_ffn, expert_ffn: size of the dense MLP and of one expert (SwiGLU, three matrices).
        experts, top_k, shared_experts: number of experts, of those that a token visits, of those that it always does.
        max_nodes: nodes that a token's experts may be on at most; 0: any number.
        vocabulary: size of the vocabulary.
        expert_parallel: size of the expert-parallel group that the costs are for.
    """

    name: str
    source: str
    num_layers: Count
    num_dense: Count = 0
    hidden: Count
    heads: Count
    kv_heads: Count
    qk_dim: Count
    v_dim: Count
    q_rank: Count = 0
    kv_rank: Count = 0
    rope_dim: Count = 0
    dense_ffn: Count = 0
    expert_ffn: Count
    experts: Count
    top_k: Count
    shared_experts: Count = 0
    max_nodes: Count = 0
    vocabulary: Count
    expert_parallel: Annotated[int, Field(ge=1)]

    def shape(
        self,
        *,
        num_layers: int | None = None,
        wgrad: bool = True,
        pre_process: bool = True,
        post_process: bool = True,
    ) -> ChunkShape:
        """The model's shape, or that of its first layers.

        Raises:
            PlanError: no layers.
        """
        count = self.num_layers if num_layers is None else num_layers
        check_argument("num_layers", count, int)
        if count < 1:
            raise PlanError(f"num_layers={count}; give 1 or more, or None for the model's own")
        kinds = ["dense" if layer < self.num_dense else "moe" for layer in range(count)]
        return ChunkShape.of(kinds, pre_process=pre_process, post_process=post_process, wgrad=wgrad)

    def costs(self, hardware: Hardware = H100, *, tokens: int = 4096, sequence: int = 4096) -> CostModel:
        """The model's costs, by the formulas of the module.

        Args:
            hardware: the rates.
            tokens: tokens of a microbatch on one GPU.
            sequence: tokens of a sequence.

        Raises:
            CostError: no tokens, or sequences of no length.
        """
        check_argument("hardware", hardware, Hardware, advice="take one of layernodes.plan.hardware, such as H100")
        check_argument("tokens", tokens, int)
        check_argument("sequence", sequence, int)
        if tokens < 1 or sequence < 1:
            raise CostError(f"tokens={tokens}, sequence={sequence}; give at least 1 of each")
        build = _Build(self, hardware, tokens, sequence)
        pre, dense_pre = build.pre_dispatch(moe=True), build.pre_dispatch(moe=False)
        experts = build.mlp(rows=self.top_k, ffn=self.expert_ffn)
        dense = build.mlp(rows=1, ffn=self.dense_ffn)
        exchange = build.exchange()
        rest: dict[str, SlotCost] = {Slot.POST_COMBINE: FREE, Slot.MTP_POST_PROCESS: build.norm()}
        moe: dict[str, SlotCost] = {
            Slot.PRE_DISPATCH_COMPUTATION: pre,
            Slot.MOE_DISPATCH: exchange,
            Slot.MLP: experts,
            Slot.MOE_COMBINE: exchange,
        }
        plain: dict[str, SlotCost] = {Slot.PRE_DISPATCH_COMPUTATION: dense_pre, Slot.MLP: dense}
        return CostModel(
            name=f"{self.name}, EP={self.expert_parallel}, {tokens} tokens, {hardware.name}",
            kinds={"moe": {**moe, **rest}, "dense": {**plain, **rest}},
            ends={PRE_PROCESS: build.embedding(), POST_PROCESS: build.head()},
        )


class _Build:
    def __init__(self, preset: Preset, hardware: Hardware, tokens: int, sequence: int) -> None:
        self.preset = preset
        self.hardware = hardware
        self.tokens = tokens
        self.sequence = sequence

    def pre_dispatch(self, *, moe: bool) -> SlotCost:
        """Norms, attention and, for MoE layers, router and shared experts."""
        p, tokens = self.preset, self.tokens
        shared = 3 * p.hidden * p.expert_ffn * p.shared_experts if moe else 0
        linear = self.attention_parameters() + shared + (p.hidden * p.experts if moe else 0)
        core = tokens * self.sequence / 2 * p.heads * 2 * (p.qk_dim + p.v_dim)
        norms = self.elementwise(8 * p.hidden * tokens)
        heads = p.heads * (p.qk_dim + p.v_dim) + p.kv_heads * (p.qk_dim + p.v_dim)
        saved = 3 * p.hidden + p.q_rank + p.kv_rank + heads + 3 * p.expert_ffn * (p.shared_experts if moe else 0)
        return SlotCost(
            F=self.matmul(2 * linear * tokens + core) + norms,
            B=self.matmul(2 * linear * tokens + 2.5 * core) + norms,
            W=self.matmul(2 * linear * tokens),
            activation_bytes=_BYTES * tokens * saved,
            wgrad_bytes=_BYTES * tokens * (2 * p.hidden + heads),
        )

    def attention_parameters(self) -> int:
        """Parameters of the projections, latent or plain."""
        p = self.preset
        out = p.heads * p.v_dim * p.hidden
        if not p.kv_rank:
            return p.hidden * p.heads * p.qk_dim + p.hidden * p.kv_heads * (p.qk_dim + p.v_dim) + out
        queries = p.hidden * p.q_rank + p.q_rank * p.heads * p.qk_dim
        keys = p.hidden * (p.kv_rank + p.rope_dim) + p.kv_rank * p.heads * (p.qk_dim - p.rope_dim + p.v_dim)
        return queries + keys + out

    def mlp(self, *, rows: int, ffn: int) -> SlotCost:
        """A SwiGLU MLP over some rows a token."""
        p, count = self.preset, rows * self.tokens
        seconds = self.matmul(2 * 3 * p.hidden * ffn * count)
        gate = self.elementwise(3 * ffn * count)
        return SlotCost(
            F=seconds + gate,
            B=seconds + 2 * gate,
            W=seconds,
            activation_bytes=_BYTES * count * (p.hidden + 3 * ffn),
            wgrad_bytes=_BYTES * count * (2 * p.hidden + 3 * ffn),
        )

    def exchange(self) -> SlotCost:
        """One all-to-all."""
        p, hardware = self.preset, self.hardware
        nodes = -(-p.expert_parallel // hardware.node_size)
        places = nodes if nodes > 1 else p.expert_parallel
        distinct = places * (1 - (1 - 1 / places) ** p.top_k)
        if nodes > 1 and p.max_nodes:
            distinct = min(distinct, p.max_nodes)
        sent = self.tokens * distinct * (places - 1) / places * p.hidden * _BYTES
        bandwidth = hardware.network_bandwidth if nodes > 1 else hardware.node_bandwidth
        seconds = sent / bandwidth + hardware.latency if places > 1 else 0.0
        return SlotCost(F=seconds, B=seconds)

    def embedding(self) -> SlotCost:
        """The lookup; its weight gradient is a scatter of the same size."""
        seconds = self.elementwise(2 * self.preset.hidden * self.tokens)
        return SlotCost(F=seconds, B=0.0, W=seconds)

    def head(self) -> SlotCost:
        """The output layer and the loss."""
        p = self.preset
        seconds = self.matmul(2 * p.hidden * p.vocabulary * self.tokens)
        loss = self.elementwise(4 * p.vocabulary * self.tokens)
        return SlotCost(
            F=seconds + loss, B=seconds + loss, W=seconds, activation_bytes=_BYTES * self.tokens * p.vocabulary
        )

    def norm(self) -> SlotCost:
        """A norm of the hidden states: read and written, backward with their gradient read too."""
        elements = self.preset.hidden * self.tokens
        return SlotCost(
            F=self.elementwise(2 * elements), B=self.elementwise(3 * elements), activation_bytes=_BYTES * elements
        )

    def matmul(self, flops: float) -> float:
        return flops / (self.hardware.peak_flops * self.hardware.efficiency)

    def elementwise(self, elements: float) -> float:
        return _BYTES * elements / self.hardware.memory_bandwidth


PRESETS: Final[Mapping[str, Preset]] = {
    "deepseek-v3": Preset(
        name="DeepSeek-V3",
        source="DeepSeek-V3 Technical Report, arXiv:2412.19437, section 4.2, and the released config.json",
        num_layers=61,
        num_dense=3,
        hidden=7168,
        heads=128,
        kv_heads=128,
        qk_dim=192,
        v_dim=128,
        q_rank=1536,
        kv_rank=512,
        rope_dim=64,
        dense_ffn=18432,
        expert_ffn=2048,
        experts=256,
        top_k=8,
        shared_experts=1,
        max_nodes=4,
        vocabulary=129280,
        expert_parallel=64,
    ),
    "qwen3-235b-a22b": Preset(
        name="Qwen3-235B-A22B",
        source="Qwen3 Technical Report, arXiv:2505.09388, table 2, and the released config.json",
        num_layers=94,
        hidden=4096,
        heads=64,
        kv_heads=4,
        qk_dim=128,
        v_dim=128,
        expert_ffn=1536,
        experts=128,
        top_k=8,
        vocabulary=151936,
        expert_parallel=32,
    ),
    "mixtral-8x7b": Preset(
        name="Mixtral-8x7B",
        source="Mixtral of Experts, arXiv:2401.04088, table 1",
        num_layers=32,
        hidden=4096,
        heads=32,
        kv_heads=8,
        qk_dim=128,
        v_dim=128,
        expert_ffn=14336,
        experts=8,
        top_k=2,
        vocabulary=32000,
        expert_parallel=8,
    ),
}
"""The presets by name."""


def preset(name: str) -> Preset:
    """The preset of this name.

    Raises:
        CostError: there is none.
    """
    check_argument("name", name, str, advice=f"give one of {', '.join(PRESETS)}")
    if name not in PRESETS:
        raise CostError(f"unknown preset {name!r}; choose one of {', '.join(PRESETS)}")
    return PRESETS[name]
