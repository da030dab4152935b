"""The adapter: the only place, with ``layernodes.cpu``, that uses private names of Megatron-Core."""

from __future__ import annotations

from layernodes.quiet import quiet_import

with quiet_import():
    import megatron.core.models.common.fine_grained_callables
    import megatron.core.models.gpt
    import megatron.core.models.gpt.gpt_layer_specs
    import megatron.core.models.hybrid.hybrid_model  # noqa: F401
