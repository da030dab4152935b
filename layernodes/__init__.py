"""Transformer layers as typed nodes: hide expert-parallel communication behind computation, bit for bit.

The public names; see the README for where to begin.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from layernodes.cpu import CpuHost, cpu_host
    from layernodes.errors import (
        ArgumentError,
        BatchError,
        ConfigViolation,
        CostError,
        LayerNodesError,
        MissingExtraError,
        NodeDefinitionError,
        NodeStateError,
        OptionError,
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
        AttentionNode,
        CombineExchangeNode,
        CombineNode,
        DispatchNode,
        ExpertNode,
        MixerNode,
        MLPNode,
        MTPPostNode,
        PostCombineNode,
        PreDispatchNode,
        ScheduleNode,
        WgradHook,
    )
    from layernodes.plan import pairs, schedules
    from layernodes.plan.chunk_plan import ChunkPlan
    from layernodes.plan.chunk_run import ChunkRun
    from layernodes.plan.costs import CostModel, SlotCost
    from layernodes.plan.describe import LayerDescription, NodeDescription
    from layernodes.plan.explanation import Explanation, explain
    from layernodes.plan.forward_funcs import ForwardFuncs
    from layernodes.plan.generators import backward_steps, forward_steps, interleave, pair_steps
    from layernodes.plan.layer_hooks import LayerHooks
    from layernodes.plan.layer_plan import LayerPlan
    from layernodes.plan.measurement import Measurement, SlotSpread
    from layernodes.plan.optimize import optimize, optimize_pair
    from layernodes.plan.presets import preset
    from layernodes.plan.profile import profile
    from layernodes.plan.recording import Record, RecordingStreams, RecordKind
    from layernodes.plan.registry import LayerRegistry
    from layernodes.plan.rng import RngMode
    from layernodes.plan.runner import Runner, RunResult
    from layernodes.plan.schedule import PairSchedule, Schedule
    from layernodes.plan.shape import ChunkShape, LayerShape, SlotShape
    from layernodes.plan.simulate import simulate
    from layernodes.plan.step import Step
    from layernodes.plan.stream_kind import StreamKind
    from layernodes.plan.timeline import Interval, Timeline
    from layernodes.plan.validate import validate, validate_pair
    from layernodes.slots import MEGATRON_SLOTS, ExtraSlot, Phase, Slot, StreamType
    from layernodes.state import Handoffs, NodeContext
    from layernodes.wgrad import WgradStore

_NAMES: Final = {
    "layernodes.cpu": ("CpuHost", "cpu_host"),
    "layernodes.errors": (
        "ArgumentError",
        "BatchError",
        "ConfigViolation",
        "CostError",
        "MissingExtraError",
        "LayerNodesError",
        "NodeDefinitionError",
        "NodeStateError",
        "OptionError",
        "PlanError",
        "RankMismatchError",
        "ScheduleError",
        "ScheduleParseError",
        "StepError",
        "StreamOrderError",
        "UnsupportedLayerError",
        "Violation",
    ),
    "layernodes.megatron": (
        "Installation",
        "build_layer_callables",
        "build_mtp_layer_callables",
        "build_transformer_layer_callables",
        "get_layer_moe_metadata",
        "install",
    ),
    "layernodes.nodes": (
        "AttentionNode",
        "CombineExchangeNode",
        "CombineNode",
        "DispatchNode",
        "ExpertNode",
        "MLPNode",
        "MTPPostNode",
        "MixerNode",
        "PostCombineNode",
        "PreDispatchNode",
        "ScheduleNode",
        "WgradHook",
    ),
    "layernodes.plan": ("pairs", "schedules"),
    "layernodes.plan.chunk_plan": ("ChunkPlan",),
    "layernodes.plan.chunk_run": ("ChunkRun",),
    "layernodes.plan.costs": ("CostModel", "SlotCost"),
    "layernodes.plan.simulate": ("simulate",),
    "layernodes.plan.measurement": ("Measurement", "SlotSpread"),
    "layernodes.plan.optimize": ("optimize", "optimize_pair"),
    "layernodes.plan.presets": ("preset",),
    "layernodes.plan.profile": ("profile",),
    "layernodes.plan.describe": ("LayerDescription", "NodeDescription"),
    "layernodes.plan.explanation": ("Explanation", "explain"),
    "layernodes.plan.generators": ("backward_steps", "forward_steps", "interleave", "pair_steps"),
    "layernodes.plan.layer_hooks": ("LayerHooks",),
    "layernodes.plan.forward_funcs": ("ForwardFuncs",),
    "layernodes.plan.layer_plan": ("LayerPlan",),
    "layernodes.plan.recording": ("Record", "RecordingStreams", "RecordKind"),
    "layernodes.plan.registry": ("LayerRegistry",),
    "layernodes.plan.rng": ("RngMode",),
    "layernodes.plan.runner": ("Runner", "RunResult"),
    "layernodes.plan.schedule": ("PairSchedule", "Schedule"),
    "layernodes.plan.shape": ("ChunkShape", "LayerShape", "SlotShape"),
    "layernodes.plan.step": ("Step",),
    "layernodes.plan.stream_kind": ("StreamKind",),
    "layernodes.plan.timeline": ("Interval", "Timeline"),
    "layernodes.plan.validate": ("validate", "validate_pair"),
    "layernodes.slots": ("MEGATRON_SLOTS", "ExtraSlot", "Phase", "Slot", "StreamType"),
    "layernodes.state": ("Handoffs", "NodeContext"),
    "layernodes.wgrad": ("WgradStore",),
}
"""The public names by module; a module is imported with its first name, so that schedules, as data, need no torch."""

_HOME: Final = {name: module for module, names in _NAMES.items() for name in names}

__all__ = [
    "CostModel",
    "SlotCost",
    "simulate",
    "optimize",
    "optimize_pair",
    "explain",
    "preset",
    "profile",
    "CostError",
    "MissingExtraError",
    "MEGATRON_SLOTS",
    "AttentionNode",
    "ArgumentError",
    "BatchError",
    "ChunkPlan",
    "ChunkRun",
    "ChunkShape",
    "CombineExchangeNode",
    "CombineNode",
    "ConfigViolation",
    "CpuHost",
    "DispatchNode",
    "ExpertNode",
    "Explanation",
    "ExtraSlot",
    "ForwardFuncs",
    "Handoffs",
    "Installation",
    "Interval",
    "LayerDescription",
    "LayerHooks",
    "LayerNodesError",
    "LayerPlan",
    "LayerRegistry",
    "LayerShape",
    "MLPNode",
    "MTPPostNode",
    "Measurement",
    "MixerNode",
    "NodeContext",
    "NodeDefinitionError",
    "NodeDescription",
    "NodeStateError",
    "OptionError",
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
    "SlotSpread",
    "Step",
    "StepError",
    "StreamKind",
    "StreamOrderError",
    "StreamType",
    "Timeline",
    "UnsupportedLayerError",
    "Violation",
    "WgradHook",
    "WgradStore",
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


def __getattr__(name: str) -> Any:
    if name in _HOME:
        value = _look_up(_HOME[name], name)
        globals()[name] = value
        return value
    try:
        return importlib.import_module(f"layernodes.{name}")
    except ModuleNotFoundError as error:
        if error.name != f"layernodes.{name}":
            raise
        raise AttributeError(f"module 'layernodes' has no attribute {name!r}") from None


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _look_up(module: str, name: str) -> Any:
    home = importlib.import_module(module)
    return getattr(home, name) if hasattr(home, name) else importlib.import_module(f"{module}.{name}")
