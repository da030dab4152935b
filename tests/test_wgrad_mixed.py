"""Deferred and undeferred microbatches on the same parameters: hooks fire once each, with the whole gradient there."""

from __future__ import annotations

import copy
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from hypothesis import event, given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import Linear, Module, Sequential, Tanh

from layernodes import ChunkPlan, LayerPlan, Runner, Slot, pairs, schedules
from layernodes.plan.chunk_run import ChunkRun
from tests.support.full import property_settings
from tests.support.wgrads import ModuleNode, plan_of, run

_LAYERS = ("a", "b", "a")
"""What each layer of the chunk runs: the first and the last are one module."""

_MODES: dict[str, tuple[str, str, str] | None] = {
    "all deferred": ("auto", "auto", "auto"),
    "none": ("off", "off", "off"),
    "the first layer": ("auto", "off", "off"),
    "the last layer": ("off", "off", "auto"),
    "both ends": ("auto", "off", "auto"),
    "plain autograd": None,
}


def _modules() -> dict[str, Module]:
    return {name: Sequential(Linear(3, 4), Tanh(), Linear(4, 3)) for name in "ab"}


def _named(modules: dict[str, Module]) -> dict[str, Any]:
    return {f"{key}.{name}": p for key, module in modules.items() for name, p in module.named_parameters()}


def _chunk(modules: dict[str, Module], modes: Sequence[str]) -> ChunkPlan:
    return ChunkPlan.of(
        [
            LayerPlan.build(modules[name], nodes={Slot.MLP: ModuleNode}, wgrad=mode)
            for name, mode in zip(_LAYERS, modes, strict=True)
        ]
    )


def _forward(modules: dict[str, Module], x: Tensor) -> Tensor:
    for name in _LAYERS:
        x = modules[name](x)
    return x


_PASSES = [("F", 0), ("F", 1), ("F", 2), ("B", 2), ("B", 1), ("B", 0)]


class _Microbatch:
    """One microbatch in one mode: its steps in order, and the weight gradients that may come at any time after."""

    def __init__(self, modules: dict[str, Module], mode: str, x: Tensor) -> None:
        self._modules, self._x = modules, x
        self.modes = _MODES[mode]
        self.steps: list[str] = ["B"] if self.modes is None else [f"{p}{i}" for p, i in _PASSES]
        self.waiting: list[str] = []
        if self.modes is not None:
            self._chunk = _chunk(modules, self.modes)
            self._run: ChunkRun = self._chunk.open(x)
            self._at = [i for i, place in enumerate(self._chunk.places) if place.node is not None]

    def next(self, choose: Callable[[list[str]], str]) -> str | None:
        """Take one of the steps that may come now; None where none is left."""
        ready = [*self.steps[:1], *self.waiting]
        if not ready:
            return None
        step = choose(ready)
        (self.waiting if step in self.waiting else self.steps).remove(step)
        return step

    def perform(self, step: str) -> None:
        """Run one of the steps that are ``ready``."""
        if self.modes is None:
            _forward(self._modules, self._x).sum().backward()
            return
        phase, layer = step[0], int(step[1])
        if phase == "F":
            self._run.forward(self._at[layer], None)
            if layer == len(_LAYERS) - 1:
                self._run.end_forward()
                self._run.begin_backward(None)
        elif phase == "B":
            self._run.backward(self._at[layer])
            if self.modes[layer] == "auto":
                self.waiting.append(f"W{layer}")
            if layer == 0:
                self._run.end_backward()
        else:
            self._run.weight_gradients(self._at[layer])

    def comes_with(self, name: str) -> set[str]:
        """The steps that contribute to a parameter."""
        if self.modes is None:
            return {"B"}
        layers = [i for i, of_layer in enumerate(_LAYERS) if of_layer == name[0]]
        deferred = name.endswith("weight")
        return {f"{'W' if deferred and self.modes[i] == 'auto' else 'B'}{i}" for i in layers}

    def close(self) -> None:
        """Nothing may be left."""
        if self.modes is not None:
            self._run.close()


@given(modes=st.lists(st.sampled_from(sorted(_MODES)), min_size=2, max_size=4), seed=st.integers(0, 2**32 - 1))
@property_settings(100)
def test_hooks_fire_once_a_microbatch_with_its_whole_gradient(modes: list[str], seed: int) -> None:
    """Steps of all microbatches at random: a parameter's hook fires at the last step that contributes to it, when its
    gradient is the sum of the plain gradients of the microbatches that have fired."""
    torch.manual_seed(seed % 1000)
    draw = random.Random(seed)
    modules = _modules()
    batches = [torch.randn(5, 3) for _ in modes]
    plain: list[dict[str, Tensor]] = []
    for x in batches:
        alone = copy.deepcopy(modules)
        _forward(alone, x).sum().backward()
        plain.append({name: p.grad for name, p in _named(alone).items()})
    microbatches = [_Microbatch(modules, mode, x) for mode, x in zip(modes, batches, strict=True)]
    now: list[tuple[int, str]] = []
    fired: dict[str, list[tuple[int, str]]] = {name: [] for name in _named(modules)}

    def ready(parameter: Any, name: str) -> None:
        fired[name].append(now[-1])
        total: Tensor | None = None
        for m, _ in fired[name]:
            total = plain[m][name] if total is None else total + plain[m][name]
        assert total is not None
        assert torch.equal(parameter.grad, total), (name, fired[name])

    for name, parameter in _named(modules).items():
        parameter.register_post_accumulate_grad_hook(lambda p, name=name: ready(p, name))
    left = list(range(len(modes)))
    while left:
        m = draw.choice(left)
        step = microbatches[m].next(draw.choice)
        if step is None:
            left.remove(m)
        else:
            now.append((m, step))
            microbatches[m].perform(step)
    for microbatch in microbatches:
        microbatch.close()
    for name, found in fired.items():
        # In the order of the firings, one a microbatch, each at the last of its contributions.
        last = {m: _last(now, m, microbatch.comes_with(name)) for m, microbatch in enumerate(microbatches)}
        assert found == [now[at] for at in sorted(last.values())], name
    event(f"{len(set(modes))} kinds")


def _last(done: list[tuple[int, str]], m: int, steps: set[str]) -> int:
    return max(at for at, (of, step) in enumerate(done) if of == m and step in steps)


def _alternating(modules: list[Module], batches: list[Tensor]) -> Iterator[str]:
    """Pairs of one runner: the forward of each microbatch beside the backward of the one before, every other of them
    deferred; yields, after each pair, the hooks that fired with the phase that they fired in."""
    chunks = {mode: plan_of(*modules, wgrad=mode) for mode in ("auto", "off")}
    modes = ["auto" if i % 2 == 0 else "off" for i in range(len(batches))]
    before: Any = None
    now: list[str] = []
    fired: list[str] = []
    for module in modules:
        for name, p in module.named_parameters():
            p.register_post_accumulate_grad_hook(
                lambda p, name=name: fired.append(f"{now[-1][0]} {name} {float(p.grad.sum()) != 0.0}")
            )
    with Runner("threads", before_step=lambda step: now.append(str(step))) as runner:
        for i in range(len(batches) + 1):
            after = chunks[modes[i]].open(batches[i]) if i < len(batches) else None
            shapes = [None if one is None else one.plan.shape for one in (after, before)]
            order = pairs.deferred(pairs.combined_1f1b(*shapes), *shapes, "end")
            runner.run_pair(order, after, before)
            yield "; ".join(sorted(fired))
            fired.clear()
            before = after


def test_pairs_of_a_deferred_and_an_undeferred_microbatch() -> None:
    """As a trainer would run them over two chunk plans of the same layers."""
    torch.manual_seed(0)
    ours = [Sequential(Linear(3, 4), Tanh(), Linear(4, 3)) for _ in range(2)]
    theirs = copy.deepcopy(ours)
    batches = [torch.randn(5, 3) for _ in range(4)]
    for x in batches:
        theirs[1](theirs[0](x)).sum().backward()
    names = ("0.bias", "0.weight", "2.bias", "2.weight")
    deferred = "; ".join(sorted(f"{'W' if 'weight' in name else 'B'} {name} True" for name in names for _ in ours))
    undeferred = "; ".join(sorted(f"B {name} True" for name in names for _ in ours))
    assert list(_alternating(ours, batches)) == ["", deferred, undeferred, deferred, undeferred]
    for a, b in zip(ours, theirs, strict=True):
        assert all(torch.equal(x.grad, y.grad) for x, y in zip(a.parameters(), b.parameters(), strict=True))


def test_a_sharded_optimizer_steps_at_the_last_one() -> None:
    """It counts a parameter's microbatches and takes its gradient away at the last: whole, whichever way each came."""
    torch.manual_seed(2)
    module = Sequential(Linear(3, 4), Tanh(), Linear(4, 3))
    plain = copy.deepcopy(module)
    batches = [torch.randn(5, 3) for _ in range(4)]
    for x in batches:
        plain(x).sum().backward()
    counts: Counter[Any] = Counter()
    taken: dict[Any, Tensor] = {}

    def ready(parameter: Any) -> None:
        counts[parameter] += 1
        if counts[parameter] == len(batches):
            taken[parameter], parameter.grad = parameter.grad, None

    for parameter in module.parameters():
        parameter.register_post_accumulate_grad_hook(ready)
    deferring, undeferred = plan_of(module), plan_of(module, wgrad="off")
    run(schedules.serial(undeferred.shape, 1), undeferred, batches[:1])
    shape = deferring.shape
    run(schedules.deferred(schedules.forward_forward(shape, 2), shape, "end"), deferring, batches[1:3])
    module(batches[3]).sum().backward()
    assert set(counts.values()) == {4}
    for ours, theirs in zip(module.parameters(), plain.parameters(), strict=True):
        assert ours.grad is None
        assert theirs.grad is not None
        assert torch.equal(taken[ours], theirs.grad)
