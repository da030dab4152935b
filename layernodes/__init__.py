"""Transformer layers as typed nodes: hide expert-parallel communication behind computation, bit for bit.

The public names; see the README for where to begin.
"""

from __future__ import annotations

from layernodes.cpu import CpuHost, cpu_host
from layernodes.errors import (
    LayerNodesError,
    NodeDefinitionError,
    NodeStateError,
    PlanError,
    RankMismatchError,
    ScheduleError,
    ScheduleParseError,
    StepError,
    UnsupportedLayerError,
    Violation,
)
from layernodes.megatron import (
    Installation,
    build_layer_callables,
    build_mtp_layer_callables,
    build_transformer_layer_callables,
    get_layer_moe_metadata,
    install,
)
from layernodes.nodes import (
    CombineExchangeNode,
    CombineNode,
    DispatchNode,
    ExpertNode,
    MTPPostNode,
    PostCombineNode,
    PreDispatchNode,
    ScheduleNode,
    WgradHook,
)
from layernodes.plan.describe import LayerDescription, NodeDescription
from layernodes.plan.layer_plan import ForwardFuncs, LayerPlan
from layernodes.slots import MEGATRON_SLOTS, ExtraSlot, Phase, Slot, StreamType
from layernodes.state import Handoffs, NodeContext

__all__ = [
    "MEGATRON_SLOTS",
    "CombineExchangeNode",
    "CombineNode",
    "CpuHost",
    "DispatchNode",
    "ExpertNode",
    "ExtraSlot",
    "ForwardFuncs",
    "Handoffs",
    "Installation",
    "LayerDescription",
    "LayerNodesError",
    "LayerPlan",
    "MTPPostNode",
    "NodeContext",
    "NodeDefinitionError",
    "NodeDescription",
    "NodeStateError",
    "Phase",
    "PlanError",
    "PostCombineNode",
    "PreDispatchNode",
    "RankMismatchError",
    "ScheduleError",
    "ScheduleNode",
    "ScheduleParseError",
    "Slot",
    "StepError",
    "StreamType",
    "UnsupportedLayerError",
    "Violation",
    "WgradHook",
    "build_layer_callables",
    "build_mtp_layer_callables",
    "build_transformer_layer_callables",
    "cpu_host",
    "get_layer_moe_metadata",
    "install",
]
