"""The demonstration: a Megatron-Core MoE model on real text, plainly and through the nodes, bit for bit."""

from __future__ import annotations

import layernodes._megatron  # noqa: F401 first, without Megatron-Core's remarks on what is not installed
