"""Fixtures of the tests that run Megatron models in this process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

import layernodes
from tests.support.deepep import emulated_backends
from tests.support.world import single_process_world

MEGATRON_WORLD = [
    pytest.mark.usefixtures("megatron_world"),
    # Megatron-Core warns of what it deprecates in its own defaults.
    pytest.mark.filterwarnings(r"ignore::Warning:megatron\."),
]
"""``pytestmark`` of a module whose tests run Megatron models; it imports the fixture ``megatron_world`` too."""


@pytest.fixture(scope="module")
def megatron_world() -> Iterator[None]:
    """A world of this one process, on the CPU host, with the flex backends emulated."""
    with layernodes.cpu_host(), single_process_world(), emulated_backends():
        yield
    get_cuda_rng_tracker().reset()
    get_moe_metrics_tracker().metrics.clear()
    MTPLossLoggingHelper.tracker.clear()
