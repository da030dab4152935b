"""Where the products of deferred weight gradients run: bound when W runs, not when it was parked."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.nn import Module
from torch.utils._python_dispatch import TorchDispatchMode

from layernodes import Slot, schedules
from layernodes.plan.chunk_plan import ChunkPlan
from layernodes.plan.chunk_run import ChunkRun
from tests.support.device import StandInStream, stand_in_device
from tests.support.wgrads import PRODUCTS, CommNode, Grid, ModuleNode, StoreNode, chunk_of, plan_of, run
from tests.test_wgrad import OwnHookNode, parked

MLP, COMM = Slot.MLP, Slot.MOE_DISPATCH


class _Places(TorchDispatchMode):
    """Notes, for each product, what ``where`` says."""

    def __init__(self, where: Callable[[], Any]) -> None:
        super().__init__()
        self._where = where
        self.products: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ in PRODUCTS:
            self.products.append(self._where())
        return func(*args, **(kwargs or {}))


def _square() -> Grid:
    return Grid(torch.randn(4, 4))


_KINDS: dict[str, Callable[[Module], ChunkPlan]] = {
    "linear": lambda m: plan_of(m, forward=lambda m, x: F.linear(x, m.w)),
    "any other product": lambda m: plan_of(m, forward=lambda m, x: torch.einsum("bi,oi->bo", x, m.w)),
    "parked": lambda m: chunk_of((m, {MLP: lambda it: StoreNode(it, parked)})),
    "a hook of one's own": lambda m: chunk_of((m, {MLP: OwnHookNode})),
}


def _backward(chunk: ChunkPlan) -> tuple[ChunkRun, int]:
    """A microbatch that has gone forward and backward; its W is still to run, at the place returned."""
    (at,) = (index for index, place in enumerate(chunk.places) if place.node is not None)
    chunk_run = chunk.open(torch.randn(3, 4, requires_grad=True))
    chunk_run.forward(at, None)
    chunk_run.end_forward()
    chunk_run.begin_backward(None)
    chunk_run.backward(at)
    chunk_run.end_backward()
    return chunk_run, at


@pytest.mark.parametrize("kind", _KINDS)
def test_parked_by_one_thread_and_drained_by_another(kind: str) -> None:
    """The product and the parameter's hooks run on the thread of W; the one that parked computes nothing more."""
    module = _square()
    fired: list[str] = []
    module.w.register_post_accumulate_grad_hook(lambda _: fired.append(threading.current_thread().name))
    parking = _Places(lambda: threading.current_thread().name)
    draining = _Places(lambda: threading.current_thread().name)
    with parking:
        chunk_run, at = _backward(_KINDS[kind](module))
    caller = threading.current_thread().name
    assert parking.products == [caller] * 2
    assert module.w.grad is None

    def drain() -> None:
        with draining:
            chunk_run.weight_gradients(at)

    thread = threading.Thread(target=drain, name="drains")
    with parking:
        thread.start()
        thread.join()
    assert parking.products == [caller] * 2
    assert draining.products == fired == ["drains"]
    assert module.w.grad is not None
    chunk_run.close()


@pytest.mark.parametrize("kind", _KINDS)
def test_parked_under_one_stream_and_drained_under_another(kind: str) -> None:
    """The device's current stream is the one of W while the product runs."""
    module = _square()
    with stand_in_device() as device:
        first, second = device.stream, StandInStream()
        places = _Places(lambda: device.stream)
        fired: list[Any] = []
        module.w.register_post_accumulate_grad_hook(lambda _: fired.append(device.stream))
        with places:
            chunk_run, at = _backward(_KINDS[kind](module))
            device.set_stream(second)
            chunk_run.weight_gradients(at)
        chunk_run.close()
        assert places.products == [first, first, second]
        assert fired == [second]
        assert device.stream is second


@pytest.mark.parametrize("place", ["after_b", "end"])
def test_a_runners_w_runs_on_the_stream_of_its_slot(place: str) -> None:
    """Of a communication slot on the communication stream, of a compute slot on the caller's, in every phase."""
    module = torch.nn.ModuleDict({"a": torch.nn.Linear(4, 4), "b": torch.nn.Linear(4, 4)})
    chunk = chunk_of((module, {COMM: lambda it: CommNode(it["a"]), MLP: lambda it: ModuleNode(it["b"])}))
    order = schedules.deferred(schedules.combined_1f1b(chunk.shape, 3), chunk.shape, place)
    with stand_in_device() as device:
        compute = device.stream
        found: dict[tuple[str, str], set[bool]] = {}
        now: list[Any] = []

        def where() -> None:
            step = now[-1]
            found.setdefault((str(step)[0], step.slot), set()).add(device.stream is compute)

        with _Places(where):
            batches = [torch.randn(3, 4, requires_grad=True) for _ in range(3)]
            run(order, chunk, batches, streams="cuda", before_step=now.append)
        assert device.stream is compute
    assert found == {(phase, slot): {slot == MLP} for phase in "FBW" for slot in (COMM, MLP)}


def _work(chunk: ChunkPlan, order: Any, count: int) -> dict[str, set[str]]:
    """What each step's stream knows to be done before the step."""
    with stand_in_device() as device:
        known: dict[str, set[str]] = {}

        def issue(step: Any) -> None:
            known[str(step)] = device.issue(str(step))

        batches = [torch.randn(3, 4, requires_grad=True) for _ in range(count)]
        run(order, chunk, batches, streams="cuda", before_step=issue)
        assert device.issue("after the run") == set(known)
    return known


@pytest.mark.parametrize("place", ["after_b", "next_comm", "end"])
def test_w_waits_for_its_b_across_streams(place: str) -> None:
    """And each step for what it depends on: what was issued there is known on its stream."""
    module = torch.nn.ModuleDict({"a": torch.nn.Linear(4, 4), "b": torch.nn.Linear(4, 4)})
    chunk = chunk_of((module, {COMM: lambda it: CommNode(it["a"]), MLP: lambda it: ModuleNode(it["b"])}))
    order = schedules.deferred(schedules.combined_1f1b(chunk.shape, 3), chunk.shape, place)
    known = _work(chunk, order, 3)
    for m in range(3):
        chain = [f"F{m}.L0.{COMM}", f"F{m}.L0.{MLP}", f"B{m}.L0.{MLP}", f"B{m}.L0.{COMM}"]
        for earlier, later in itertools.pairwise(chain):
            assert earlier in known[later]
        for slot in (COMM, MLP):
            assert f"B{m}.L0.{slot}" in known[f"W{m}.L0.{slot}"]
    assert len(known) == 3 * 6
