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
    StreamOrderError,
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
from layernodes.plan import pairs, schedules
from layernodes.plan.chunk_plan import ChunkPlan
from layernodes.plan.chunk_run import ChunkRun
from layernodes.plan.describe import LayerDescription, NodeDescription
from layernodes.plan.generators import backward_steps, forward_steps, interleave, pair_steps
from layernodes.plan.layer_plan import ForwardFuncs, LayerPlan
from layernodes.plan.recording import Record, RecordingStreams, RecordKind
from layernodes.plan.rng import RngMode
from layernodes.plan.runner import Runner, RunResult, StreamKind
from layernodes.plan.schedule import PairSchedule, Schedule
from layernodes.plan.shape import ChunkShape, LayerShape, SlotShape
from layernodes.plan.step import Step
from layernodes.plan.timeline import Interval, Timeline
from layernodes.plan.validate import validate, validate_pair
from layernodes.slots import MEGATRON_SLOTS, ExtraSlot, Phase, Slot, StreamType
from layernodes.state import Handoffs, NodeContext

__all__ = [
    "MEGATRON_SLOTS",
    "ChunkPlan",
    "ChunkRun",
    "ChunkShape",
    "CombineExchangeNode",
    "CombineNode",
    "CpuHost",
    "DispatchNode",
    "ExpertNode",
    "ExtraSlot",
    "ForwardFuncs",
    "Handoffs",
    "Installation",
    "Interval",
    "LayerDescription",
    "LayerNodesError",
    "LayerPlan",
    "LayerShape",
    "MTPPostNode",
    "NodeContext",
    "NodeDefinitionError",
    "NodeDescription",
    "NodeStateError",
    "PairSchedule",
    "Phase",
    "PlanError",
    "PostCombineNode",
    "PreDispatchNode",
    "RankMismatchError",
    "Record",
    "RecordKind",
    "RecordingStreams",
    "RngMode",
    "RunResult",
    "Runner",
    "Schedule",
    "ScheduleError",
    "ScheduleNode",
    "ScheduleParseError",
    "Slot",
    "SlotShape",
    "Step",
    "StepError",
    "StreamKind",
    "StreamOrderError",
    "StreamType",
    "Timeline",
    "UnsupportedLayerError",
    "Violation",
    "WgradHook",
    "backward_steps",
    "build_layer_callables",
    "build_mtp_layer_callables",
    "build_transformer_layer_callables",
    "cpu_host",
    "forward_steps",
    "get_layer_moe_metadata",
    "install",
    "interleave",
    "pair_steps",
    "pairs",
    "schedules",
    "validate",
    "validate_pair",
]
