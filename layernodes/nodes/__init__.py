"""The slot nodes: the base class, one class for each slot, and nothing else."""

from __future__ import annotations

from layernodes.nodes.base import ScheduleNode
from layernodes.nodes.combine import CombineExchangeNode, CombineNode, PostCombineNode
from layernodes.nodes.dispatch import DispatchNode
from layernodes.nodes.expert import ExpertNode
from layernodes.nodes.mtp_post import MTPPostNode
from layernodes.nodes.pre_dispatch import PreDispatchNode
from layernodes.nodes.whole_layer import AttentionNode, MixerNode, MLPNode
from layernodes.wgrad import WgradHook

__all__ = [
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
]
