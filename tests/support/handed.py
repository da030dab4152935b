"""Our callables handed to Megatron-Core's own schedule plan and node class, without ``install()``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from megatron.core.models.common import fine_grained_callables

import layernodes


@contextmanager
def handed_over() -> Iterator[None]:
    """Replace the builder of the callables and nothing else: Megatron's nodes free by name and run backward."""
    with mock.patch.object(fine_grained_callables, "build_layer_callables", layernodes.build_layer_callables):
        yield


HANDED = "tests.support.handed:handed_over"
"""The context's name, for ``tests.support.world.run_cells``."""
