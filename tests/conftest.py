"""Which tests run here, and the one-process world that most of them need."""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Iterator

import pytest
import torch

from layernodes.cpu import CpuHost, cpu_host
from tests.support.full import FULL

with warnings.catch_warnings():
    # Megatron-Core warns about each optional package that is missing; here warnings are errors.
    warnings.simplefilter("ignore")
    from tests.support.world import single_process_world

_left_out = pytest.StashKey[list[str]]()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the tests that cannot or should not run here, and remember why."""
    reasons = {
        "full": None if FULL else "run with `make full`",
        "gpu": None if torch.cuda.is_available() else "no GPU here",
        "te": None if importlib.util.find_spec("transformer_engine") else "Transformer Engine is not installed",
    }
    lines = []
    for marker, reason in reasons.items():
        out = [item for item in items if reason and item.get_closest_marker(marker)]
        if out:
            config.hook.pytest_deselected(items=out)
            items[:] = [item for item in items if item not in out]
            lines.append(f"{len(out)} tests marked {marker!r} left out: {reason}")
    config.stash[_left_out] = lines


def pytest_report_collectionfinish(config: pytest.Config) -> list[str]:
    """Say what was left out."""
    return config.stash.get(_left_out, [])


@pytest.fixture(scope="module")
def host() -> Iterator[CpuHost]:
    """An entered CPU host, for one test file: a file that tests the host itself must be able to do without."""
    with cpu_host() as entered:
        yield entered


@pytest.fixture(scope="module")
def world(host: CpuHost) -> Iterator[None]:
    """A process group of this one process with Megatron's groups made, under a CPU host."""
    with single_process_world():
        yield
