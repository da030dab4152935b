"""Run the property of ``tests/plan/test_runner_property.py`` many times: ``python -m tests.support.soak [COUNT]``."""

from __future__ import annotations

import sys
import time
from collections import Counter
from typing import Any

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import layernodes
from tests.support.cells import cells
from tests.support.deepep import emulated_backends
from tests.support.runs import check_example
from tests.support.world import single_process_world

_EVERY = 500


def main(wanted: int) -> int:
    """Run ``wanted`` examples drawn at random and report how many were right; exit code 1 on a failure."""
    counts: Counter[str] = Counter()
    began = time.monotonic()

    @given(
        cell=cells(),
        seed=st.integers(0, 2**32 - 1),
        streams=st.sampled_from(["inline", "threads"]),
        split_combine=st.booleans(),
        has_grads=st.booleans(),
    )
    @settings(
        max_examples=wanted,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    def soak(**example: Any) -> None:
        check_example(**example)
        counts[example["streams"]] += 1
        if counts.total() % _EVERY == 0:
            _say(f"{counts.total()} examples right after {time.monotonic() - began:.0f} s")

    failure = None
    with layernodes.cpu_host(), single_process_world(), emulated_backends():
        try:
            soak()
        except Exception as error:  # hypothesis may wrap several failures in a group
            failure = error
    shares = ", ".join(f"{count} {kind}" for kind, count in sorted(counts.items()))
    _say(f"{counts.total()} of {wanted} examples right ({shares}) in {time.monotonic() - began:.0f} s")
    if failure is not None:
        raise failure
    return 0


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else 10_000))
