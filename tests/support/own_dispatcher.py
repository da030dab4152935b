"""Megatron-Core's schedule plan on our nodes, over a user's own kind of all-gather dispatcher."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from megatron.core.transformer.moe import moe_layer
from megatron.core.transformer.moe.token_dispatcher import MoEAllGatherTokenDispatcher

import layernodes


class OwnAllGatherDispatcher(MoEAllGatherTokenDispatcher):
    """As Megatron-Core's, and so not replaced by one that gathers into tensors of its own."""


@contextmanager
def installed() -> Iterator[None]:
    """``install()``, and models made meanwhile have that dispatcher."""
    with mock.patch.object(moe_layer, "MoEAllGatherTokenDispatcher", OwnAllGatherDispatcher), layernodes.install():
        yield


OWN_DISPATCHER = "tests.support.own_dispatcher:installed"
"""The context's name, for ``tests.support.world.run_cells``."""
