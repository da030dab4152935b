"""Module calls that span slots: hooks on modules that only the plain forward calls."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

import layernodes
from tests.support.build import make_microbatches, make_model
from tests.support.compare import run_cell
from tests.support.configs import Cell, by_name
from tests.support.fixtures import MEGATRON_WORLD, megatron_world  # noqa: F401

pytestmark = [
    *MEGATRON_WORLD,
    # Layers are called with keyword arguments only, of which full backward hooks know nothing.
    pytest.mark.filterwarnings("ignore:Full backward hook is firing"),
]

_SHARED = {"moe_shared_expert_intermediate_size": 24}
_CELL = by_name("mtp-aux-ep1").with_config(**_SHARED)
_CELLS = {
    "moe-mtp": _CELL,
    "mtp-two-padding": by_name("mtp-two-ep1"),
    "mtp-repeated": by_name("mtp-repeated-ep1"),
    "dense-last": by_name("mixed-ep1"),
    "middle-chunk": by_name("middle-chunk-ep1"),
    "chunks": by_name("paired-shared-ep1").with_config(mlp_chunks_for_training=2),
    "no-final-norm": by_name("no-final-norm-ep1"),
}


def _plain(value: Any) -> Any:
    """A comparable, graph-free form of hook arguments."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, tuple | list):
        return tuple(_plain(item) for item in value)
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return type(value) if isinstance(value, torch.nn.Module) else value


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, tuple) and isinstance(b, tuple):
        return len(a) == len(b) and all(_same(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_same(a[key], b[key]) for key in a)
    return bool(a == b) if not isinstance(a, Tensor) and not isinstance(b, Tensor) else False


def _watched(model: Any) -> dict[str, Any]:
    names = {"decoder", "decoder.final_layernorm", "mtp"}
    names |= {name for name, _ in model.named_modules() if name.endswith(("mtp_model_layer", ".mlp", "self_attention"))}
    names |= {name for name, _ in model.named_modules() if name.rpartition(".")[0].endswith("layers")}
    return {name: module for name, module in model.named_modules() if name in names}


Events = dict[str, list[tuple[str, Any]]]


@contextmanager
def _recorded(model: Any) -> Iterator[Events]:
    """Everything that hooks of every kind are given, by module."""
    events: Events = defaultdict(list)
    for name, module in _watched(model).items():
        record = events[name]

        def pre(_: Any, args: Any, kwargs: Any, record: Any = record) -> None:
            record.append(("pre", _plain((args, kwargs))))

        def post(_: Any, args: Any, kwargs: Any, output: Any, record: Any = record) -> None:
            record.append(("post", _plain((args, kwargs, output))))

        def backward_pre(_: Any, grads: Any, record: Any = record) -> None:
            record.append(("backward_pre", _plain(grads)))

        def backward(_: Any, grad_inputs: Any, grad_outputs: Any, record: Any = record) -> None:
            record.append(("backward", _plain((grad_inputs, grad_outputs))))

        module.register_forward_pre_hook(pre, with_kwargs=True)
        module.register_forward_hook(post, with_kwargs=True)
        module.register_full_backward_pre_hook(backward_pre)
        module.register_full_backward_hook(backward)
    yield events


def _events_of(cell: Cell, *, plain: bool) -> Events:
    model, microbatches = make_model(cell), make_microbatches(cell)
    with _recorded(model) as events:
        for microbatch in microbatches:
            if microbatch.hidden_states is not None:
                model.set_input_tensor(microbatch.hidden_states)
            if plain:
                output = model(**microbatch.inputs)
                output.backward(microbatch.output_grad.to(output.dtype))
                continue
            with layernodes.install():
                plan = model.build_schedule_plan(**microbatch.inputs)
                output = type(plan).run(plan, None)
                type(plan).run(None, plan, b_grad=microbatch.output_grad.to(output.dtype))
    return events


@pytest.mark.parametrize("name", _CELLS)
def test_hooks_are_given_what_the_plain_model_gives(name: str) -> None:
    """Hooks of all four kinds see the plain model's arguments, outputs and gradients, as often and in its order."""
    cell = _CELLS[name]
    expected, actual = _events_of(cell, plain=True), _events_of(cell, plain=False)
    assert expected.keys() == actual.keys()
    for module, events in expected.items():
        kinds, others = [kind for kind, _ in events], [kind for kind, _ in actual[module]]
        if cell.config.get("mlp_chunks_for_training"):
            # All chunks of a slot run before the next slot: each kind keeps its order, kinds interleave differently.
            kinds.sort(), others.sort()
            events.sort(key=lambda event: event[0])
            actual[module].sort(key=lambda event: event[0])
        assert kinds == others, module
        for i, ((kind, want), (_, got)) in enumerate(zip(events, actual[module], strict=True)):
            assert _same(want, got), (module, i, kind, _difference(want, got))


def _difference(a: Any, b: Any) -> str:
    if isinstance(a, tuple) and isinstance(b, tuple):
        parts = [f"[{i}]{_difference(x, y)}" for i, (x, y) in enumerate(zip(a, b, strict=False)) if not _same(x, y)]
        return f"{len(a)} vs {len(b)} " + " ".join(parts)
    if isinstance(a, dict) and isinstance(b, dict):
        keys = f"{sorted(map(str, a.keys() ^ b.keys()))}"
        return keys + " ".join(
            f"{key}: {_difference(a[key], b[key])}" for key in a.keys() & b.keys() if not _same(a[key], b[key])
        )
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return f"{tuple(a.shape)} vs {tuple(b.shape)}"
    return f"{type(a).__name__} vs {type(b).__name__}"


def _scaled(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value * 1.25 if value.is_floating_point() else value
    return (_scaled(value[0]), *value[1:])


def _changing_hooks(model: Any, pattern: str) -> None:
    """Hooks that change what their module is given and what it returns."""
    module = model.get_submodule(pattern)

    def pre(_: Any, args: Any, kwargs: Any) -> Any:
        if "hidden_states" in kwargs:
            return args, {**kwargs, "hidden_states": kwargs["hidden_states"] * 0.75}
        return (args[0] * 0.75, *args[1:]), kwargs

    module.register_forward_pre_hook(pre, with_kwargs=True)
    module.register_forward_hook(lambda _module, _args, output: _scaled(output))
    module.register_full_backward_hook(
        lambda _module, inputs, _outputs: tuple(g if g is None else g * 2 for g in inputs)
    )


@pytest.mark.parametrize(
    "module",
    ["decoder", "decoder.layers.0", "decoder.layers.1.mlp", "mtp", "mtp.layers.0", "mtp.layers.0.mtp_model_layer"],
)
@pytest.mark.parametrize("cell", [by_name("mtp-tied-ep1"), by_name("mtp-paired-ep1")], ids=lambda cell: cell.name)
def test_hooks_may_change_what_passes(module: str, cell: Cell, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hook that replaces arguments, outputs or gradients has the effect that it has on the plain model."""

    def make(cell: Cell) -> Any:
        model = make_model(cell)
        _changing_hooks(model, module)
        return model

    monkeypatch.setattr("tests.support.compare.make_model", make)
    verdict = run_cell(cell, layernodes.install)
    assert verdict.status == "right", verdict


def test_counted_hooks_of_the_matrix() -> None:
    """The harness's own count of forward hooks agrees under every order."""
    for name in ("alltoall-moe-ep1", "mixed-ep1", "paired-mixed-ep1"):
        verdict = run_cell(by_name(name), layernodes.install, hooks=True)
        assert verdict.status == "right", verdict
