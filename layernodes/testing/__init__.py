"""For tests of one's own nodes and schedules: ``check_node`` and hypothesis strategies.

Needs ``pip install 'layernodes[testing]'``.
"""

from __future__ import annotations

from layernodes.testing.strategies import (  # first: it says what is missing
    BrokenSchedule,
    chunk_shapes,
    cost_models,
    extra_slots,
    invalid_schedules,
    megatron_configs,
    valid_schedules,
)

# isort: split
from layernodes.testing.check import check_node
from layernodes.testing.orders import random_schedule
from layernodes.testing.report import Check, Finding, NodeCheckError, NodeReport

__all__ = [
    "BrokenSchedule",
    "Check",
    "Finding",
    "NodeCheckError",
    "NodeReport",
    "check_node",
    "chunk_shapes",
    "cost_models",
    "extra_slots",
    "invalid_schedules",
    "megatron_configs",
    "random_schedule",
    "valid_schedules",
]
