"""The adapter: the only place, with ``layernodes.cpu``, that uses private names of Megatron-Core."""

from __future__ import annotations

import warnings

with warnings.catch_warnings():
    # Megatron-Core warns on import of each optional package that is missing (Apex, Transformer Engine); whoever turns
    # warnings into errors could not import us.
    warnings.simplefilter("ignore")
    import megatron.core.models.common.fine_grained_callables
    import megatron.core.models.gpt  # noqa: F401
