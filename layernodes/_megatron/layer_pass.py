"""What the parts of a layer hand to one another for one microbatch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple, final

from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor

from layernodes._megatron.calls import ModuleCall
from layernodes._megatron.private import private_tensors
from layernodes.lane import tensors_in


@final
@dataclass(kw_only=True)
class LayerPass:
    """One microbatch's pass through one layer: the private views that its slots work on, handed from slot to slot.

    Attributes:
        layer: view of the transformer layer.
        moes: views of its MoE layer, one for each chunk of ``mlp_chunks_for_training``; empty for a dense layer.
        sizes: rows of tokens of each chunk, as they left the latest slot.
        unflatten_mbs: samples that a packed batch was un-flattened into for the router, or None.
        packed_seq_params, padding_mask, context: what ``_forward_mlp`` and the call's end need of the inputs.
        call, moe_calls: calls in progress of the layer and its MoE layer, where hooks listen.
    """

    layer: TransformerLayer
    moes: list[MoELayer] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    unflatten_mbs: int | None = None
    packed_seq_params: Any = None
    padding_mask: Tensor | None = None
    context: Tensor | None = None
    call: ModuleCall | None = None
    moe_calls: list[ModuleCall | None] = field(default_factory=list)

    def tensors(self) -> Iterator[Tensor]:
        """All tensors on the private views, those that a recompute needs included."""
        yield from tensors_in((self.padding_mask, self.context))
        yield from private_tensors(self.layer)
        for moe in self.moes:
            yield from private_tensors(moe)


class Routed(NamedTuple):
    """What ``route`` makes: ``residual [s, b, h]``, the shared experts' output, and tokens with probs to dispatch."""

    residual: Tensor
    shared_expert_output: Tensor | None
    tokens: Tensor
    probs: Tensor
