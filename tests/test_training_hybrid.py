"""A ``HybridModel`` in Megatron-Core's training loop, which has no schedule plan for it: plain bits under any order."""

from __future__ import annotations

from typing import Any

import pytest
from megatron.core.models.hybrid.hybrid_model import HybridModel

from tests.support.fixtures import MEGATRON_WORLD, megatron_world
from tests.support.full import FULL
from tests.support.ranks import values_on_ranks
from tests.support.training import PLAIN, WAYS, Case, Trainer, compare, compare_all

__all__ = ["megatron_world"]

pytestmark = MEGATRON_WORLD

_STEPS = 50 if FULL else 2
_TIMEOUT = 3000.0 if FULL else 500.0

_ONE = (
    Case(name="hybrid", pattern="M*E*-"),
    Case(name="hybrid, bf16, MTP, tied", pattern="*EM-", bf16=True, mtp=1, tied=True, masked=True),
)
_TWO = (
    Case(name="hybrid, EP=2", pattern="M*E-*E", ep=2),
    Case(
        name="hybrid, EP=2, bf16, MTP, distributed optimizer",
        pattern="*E-",
        ep=2,
        bf16=True,
        mtp=1,
        ddp={"overlap_grad_reduce": True, "use_distributed_optimizer": True},
    ),
)
_STAGES: dict[str, Any] = {"pp": 2, "vpp": 2, "ep": 2}
_FOUR = (
    Case(name="hybrid, stages", pattern="*E|M*E|-E|*E", **_STAGES),
    Case(name="hybrid, stages, MTP, tied, bf16", pattern="*E|M-|*E|E*", mtp=1, tied=True, bf16=True, **_STAGES),
)


@pytest.mark.parametrize("case", _ONE, ids=lambda case: case.name)
def test_one_process(case: Case) -> None:
    """On one process, in four orders, with and without deferred weight gradients."""
    assert compare(case, WAYS, _STEPS) == []


@pytest.mark.parametrize("world_size, cases", [(2, _TWO), (4, _FOUR)], ids=["2 processes", "4 processes"])
@pytest.mark.timeout(_TIMEOUT + 60)
def test_processes(world_size: int, cases: tuple[Case, ...]) -> None:
    """With expert parallelism on two processes; with pipeline and virtual stages on four."""
    ways = WAYS
    if not FULL:  # starting and switching processes takes most of the time
        ways = WAYS[::6] if world_size == 2 else WAYS[:1]
        cases = cases if world_size == 2 else cases[1:]
    lengths = [(case, _STEPS) for case in cases]
    times = {"seconds": _TIMEOUT, "group_seconds": _TIMEOUT}
    found = values_on_ranks(f"{compare_all.__module__}:compare_all", lengths, ways, world_size=world_size, **times)
    assert found == [[]] * world_size


def test_the_method_is_there_in_the_context_only() -> None:
    """``HybridModel`` has no ``build_schedule_plan`` of its own, and none afterwards."""
    assert not hasattr(HybridModel, "build_schedule_plan")
    trainer = Trainer(_ONE[0])
    trainer.run(WAYS[0], 1, layer_hooks=None)
    assert not hasattr(HybridModel, "build_schedule_plan")
    trainer.run(PLAIN, 1)
    assert len(trainer.losses) == 2 * trainer.case.num_microbatches


@pytest.mark.parametrize("group", [False, "M* E *-", "M *E *-"])
def test_grouping_is_chosen(group: Any) -> None:
    """Whatever the grouping, the same losses and parameters."""
    runs = []
    for way, options in ((PLAIN, {}), (WAYS[0], {"group": group})):
        trainer = Trainer(_ONE[0])
        trainer.run(way, 2, **options)
        runs.append(trainer.trained())
    assert runs[0].difference(runs[1]) is None
