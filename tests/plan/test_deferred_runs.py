"""Schedules with W at any legal place, over Megatron-Core's models: the plain model's bits, and W does the work."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import event, given
from hypothesis import strategies as st
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from layernodes import ChunkPlan, schedules
from tests.support.build import make_microbatches, make_model
from tests.support.cells import cells
from tests.support.configs import Cell, by_name
from tests.support.deferred_runs import DeferredBench, MainGradBench, random_deferred_schedule
from tests.support.fixtures import MEGATRON_WORLD, megatron_world  # noqa: F401
from tests.support.full import property_settings
from tests.support.runs import Bench
from tests.support.wgrads import logged, run

pytestmark = MEGATRON_WORLD

_SETTINGS = property_settings(60)


@given(
    cell=cells(),
    seed=st.integers(0, 2**32 - 1),
    streams=st.sampled_from(["inline", "threads"]),
    split_combine=st.booleans(),
    main_grad=st.booleans(),
)
@_SETTINGS
def test_w_at_random_legal_places(cell: Cell, seed: int, streams: str, split_combine: bool, main_grad: bool) -> None:
    """Every gradient is the sum of each microbatch's plain gradient in the order of its W, or B, bit for bit."""
    bench = MainGradBench(cell) if main_grad else DeferredBench(cell)
    event(f"{streams}, {cell.num_microbatches} microbatches, {'main_grad' if main_grad else 'grad'}")
    for turn in range(2):
        schedule = random_deferred_schedule(bench, seed + turn, split_combine=split_combine)
        names = bench.check(schedule, streams=streams, split_combine=split_combine)
        assert not names, (names[:5], str(schedule))


@pytest.mark.parametrize("kind", [Bench, DeferredBench])
@pytest.mark.parametrize("name", ["mtp-repeated-ep1", "mtp-tied-ep1"])
def test_parameters_replaced_since_the_plan_was_built(name: str, kind: type[Bench]) -> None:
    """``load_state_dict(assign=True)`` puts other parameters in the modules; these run and get the gradients."""
    bench = kind(by_name(name))
    chunk = bench.chunk()
    old = list(bench.model.parameters())
    halved = {
        key: value / 2 if isinstance(value, torch.Tensor) else value for key, value in bench.model.state_dict().items()
    }
    bench.model.load_state_dict(halved, assign=True)
    assert not {id(parameter) for parameter in old} & {id(parameter) for parameter in bench.model.parameters()}
    bench.plain = bench._run_plain()
    assert bench.check(schedules.combined_1f1b(chunk.shape, 3)) == []
    assert all(parameter.grad is None for parameter in old)


_COUNTED = [
    "dense",
    "dense-linear-bias",
    "alltoall-moe-ep1",
    "alltoall-shared-gate-ep1",
    "latent-shared-ep1",
    "mla-ep1",
    "mtp-aux-ep1",
    "grouped-ep1",
    "recompute-all-ep1",
    "mla-recompute-ep1",
]


@pytest.mark.parametrize("name", _COUNTED)
def test_what_is_multiplied_in_b_and_w_is_what_was_in_b(name: str) -> None:
    """Products by shape: B and W together have those of B without deferral; F is the same; W has one a deferred use."""
    cell = by_name(name)
    logs = {}
    for mode in ("off", "auto"):
        model, microbatches = make_model(cell), make_microbatches(cell)
        chunk = ChunkPlan.build(model, wgrad=mode)
        order = schedules.deferred(schedules.serial(chunk.shape, 2), chunk.shape, "end")
        logs[mode] = logged(order, chunk, [dict(m.inputs) for m in microbatches[:2]])
    off, auto = logs["off"], logs["auto"]
    assert auto.products("F") == off.products("F")
    assert sorted(map(_sizes, auto.products("B") + auto.products("W"))) == sorted(map(_sizes, off.products("B")))
    assert off.products("W") == []
    assert len(auto.products("W")) > 0
    deferred = [
        parameter
        for plan in chunk.layers
        for node in plan.describe().nodes
        for name, parameter in plan.layer.named_parameters()
        if name in node.wgrad
    ]
    # Each weight is used once a microbatch; an expert's product of no rows counts too.
    assert len(auto.products("W")) == 2 * len(deferred)


def _sizes(shapes: tuple[tuple[int, ...], ...]) -> tuple[int, ...]:
    """The three sizes of a product, whichever way round it was computed; the bias of an addmm aside."""
    a, b = shapes[-2:]
    return tuple(sorted((*a, b[-1])))


class _Storages(TorchDispatchMode):
    """Every storage that an operation made, and those that a W step read."""

    def __init__(self) -> None:
        super().__init__()
        self.made: dict[int, tuple[StorageWeakRef, int]] = {}
        self.read: set[int] = set()
        self.step = ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if self.step.startswith("W"):  # products, and copies of operands that are not contiguous
            self.read |= {t.untyped_storage()._cdata for t in args if isinstance(t, torch.Tensor)}
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                self.made[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        return result

    def alive(self) -> dict[int, int]:
        return {key: size for key, (ref, size) in self.made.items() if size and not ref.expired()}


@pytest.mark.parametrize("name", _COUNTED)
def test_between_b_and_w_only_the_operands_of_the_products_are_alive(name: str) -> None:
    """Of all storages that operations made, those alive after the last B are read by W, or alive without deferral too;
    nothing is left after W."""
    cell = by_name(name)
    left: dict[str, int] = {}
    beside: dict[str, list[int]] = {}
    for mode in ("off", "auto"):
        model, microbatches = make_model(cell), make_microbatches(cell)
        chunk = ChunkPlan.build(model, wgrad=mode)
        order = schedules.deferred(schedules.serial(chunk.shape, 1), chunk.shape, "end")
        storages = _Storages()
        waiting: dict[int, int] = {}

        def note(step: Any, storages: Any = storages) -> None:
            storages.step = str(step)

        def look(step: Any, storages: Any = storages, waiting: Any = waiting) -> None:
            if str(step) == "B0.pre_process":
                waiting.update(storages.alive())

        with storages:
            result = run(order, chunk, [dict(microbatches[0].inputs)], before_step=note, after_step=look)
            left[mode] = sum(storages.alive().values())
        lasting = [*model.parameters(), *model.buffers(), *(p.grad for p in model.parameters()), *result.outputs]
        kept = {t.untyped_storage()._cdata for t in lasting if t is not None}
        assert bool(storages.read & waiting.keys()) is (mode == "auto")
        beside[mode] = sorted(size for key, size in waiting.items() if key not in storages.read | kept)
    assert beside["auto"] == beside["off"]
    assert left["auto"] == left["off"]
