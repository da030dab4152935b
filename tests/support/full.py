"""What ``make full`` runs more of."""

from __future__ import annotations

import os
from typing import Final

from hypothesis import HealthCheck, Phase, settings

FULL: Final = os.environ.get("LAYERNODES_FULL") == "1"


def property_settings(examples: int, *, in_full: int = 1000) -> settings:
    """Settings of a property whose examples build models: no deadline, nothing explained, as many examples as fit."""
    return settings(
        max_examples=in_full if FULL else examples,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink],
    )
