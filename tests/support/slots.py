"""One microbatch on the nodes of one layer, driven slot by slot by a Megatron-Core node class."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import torch
from megatron.core.models.common.utils import LayerState, TransformerLayerNode
from torch import Tensor

from layernodes import MEGATRON_SLOTS, LayerPlan
from layernodes._megatron.layer_kinds import moe_metadata
from layernodes._megatron.plan_nodes import ProvingLayerNode


def chunk_state(**attributes: Any) -> SimpleNamespace:
    """The inputs of a chunk that a layer reads, all absent but for those given; it has no model."""
    names = (
        *("attention_mask", "rotary_pos_emb", "rotary_pos_cos", "rotary_pos_sin", "packed_seq_params"),
        *("sequence_len_offset", "padding_mask", "extra_block_kwargs"),
    )
    return SimpleNamespace(**dict.fromkeys(names), **attributes)


class SlotRun:
    """The slots of one layer and microbatch. ``proving`` frees on proof, else Megatron's own class frees by name."""

    def __init__(self, plan: LayerPlan, *, proving: bool = True, state: Any = None, **flags: bool) -> None:
        config = getattr(plan.layer, "config", SimpleNamespace(moe_ncclep_zero_copy=False))
        is_moe, num_local_experts = moe_metadata(plan.layer) if proving is False else (plan.is_moe, None)
        extra = {"config": config, "is_moe": is_moe, "num_local_experts": num_local_experts, **flags}
        extra["delay_wgrad_compute"] = True
        self.layer_state = LayerState()
        node_class = ProvingLayerNode if proving else TransformerLayerNode
        funcs, hooks = plan.callables()
        self.nodes: Mapping[str, Any] = {
            slot.value: node_class(
                torch.cuda.Stream(),
                torch.cuda.Event(),
                self.layer_state,
                chunk_state() if state is None else state,
                func,
                name=slot.value,
                bwd_dw_callables=hooks.get(slot.value),
                extra_args=extra,
            )
            for slot, func in zip(MEGATRON_SLOTS, funcs, strict=True)
            if slot in plan.nodes
        }

    def forward(self, *inputs: Tensor) -> Any:
        """All slots in order; returns what the last one returned."""
        value: Any = inputs if len(inputs) > 1 else inputs[0]
        for node in self.nodes.values():
            value = node.forward(value)
        return value

    def steps(self, value: Any) -> Any:
        """All slots in order, one for each ``next``; yields what each returned."""
        for node in self.nodes.values():
            value = node.forward(value)
            yield value

    def backward(self, grad: Any) -> Any:
        """All slots in reverse order, then their deferred weight gradients; returns the input's gradient."""
        for node in reversed(self.nodes.values()):
            grad = node.backward(grad)
        for node in self.nodes.values():
            node.backward_dw()
        return grad


def gradients(module: torch.nn.Module) -> dict[str, Tensor | None]:
    """The gradient of every parameter, by name."""
    return {name: p.grad for name, p in module.named_parameters()}


def take_gradients(module: torch.nn.Module, run: Callable[[], object]) -> dict[str, Tensor | None]:
    """The gradients that ``run`` leaves, starting from none; cleared afterwards."""
    module.zero_grad(set_to_none=True)
    run()
    found = gradients(module)
    module.zero_grad(set_to_none=True)
    return found


def assert_equal_gradients(expected: Mapping[str, Tensor | None], actual: Mapping[str, Tensor | None]) -> None:
    """Bit for bit, None where None."""
    assert expected.keys() == actual.keys()
    for name, want in expected.items():
        got = actual[name]
        assert (want is None) == (got is None), name
        assert want is None or got is None or torch.equal(want, got), name
