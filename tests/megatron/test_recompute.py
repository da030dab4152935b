"""Where a recompute runs: in the backward of the slot that uses what was discarded, on that slot's stream."""

from __future__ import annotations

from collections import Counter

import pytest

from layernodes import Runner, Step, schedules
from tests.support.configs import by_name
from tests.support.fixtures import MEGATRON_WORLD, megatron_world  # noqa: F401
from tests.support.runs import Bench

pytestmark = MEGATRON_WORLD


@pytest.mark.parametrize("split_combine", [False, True])
@pytest.mark.parametrize(
    ("name", "norm", "slot"),
    [
        ("alltoall-recompute-layernorm-ep1", "pre_mlp_layernorm", "mlp"),
        ("alltoall-recompute-layernorm-ep1", "input_layernorm", "pre_dispatch_computation"),
        ("dense-recompute-mlp-norm", "pre_mlp_layernorm", "mlp"),
    ],
)
def test_a_norm_is_recomputed_once_where_it_is_used(name: str, norm: str, slot: str, split_combine: bool) -> None:
    """The pre-MLP norm in the experts' backward, not in that of the communication slot that comes before it."""
    bench = Bench(by_name(name))
    running: list[str] = []
    called: Counter[str] = Counter()
    getattr(bench.model.decoder.layers[0], norm).register_forward_hook(lambda *_: called.update(running[-1:]))
    chunk = bench.chunk(split_combine=split_combine)

    def note(step: Step) -> None:
        running.append(str(step))

    with Runner(streams="inline", before_step=note) as runner:
        runner.run(schedules.serial(chunk.shape, 3), chunk, bench.batches())
    used = "mlp" if name.startswith("dense") and norm == "pre_mlp_layernorm" else "pre_dispatch_computation"
    assert called == {step: 1 for m in range(3) for step in (f"F{m}.L0.{used}", f"B{m}.L0.{slot}")}
