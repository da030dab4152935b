"""What a ``HybridModel`` is refused for before anything runs, and hooks on it."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest
import torch
from megatron.core.models.hybrid.hybrid_model import HybridModel
from torch import Tensor

from layernodes import BatchError, ChunkPlan, Runner, StepError, UnsupportedLayerError, schedules
from layernodes.megatron import schedule
from tests.support.build import make_model
from tests.support.fixtures import MEGATRON_WORLD, megatron_world  # noqa: F401
from tests.support.hybrid_cells import FEATURES, hybrid_cell
from tests.support.runs import Bench

pytestmark = [
    *MEGATRON_WORLD,
    # Layers are called with keyword arguments only, of which full backward hooks know nothing.
    pytest.mark.filterwarnings("ignore:Full backward hook is firing"),
]


class _OwnForward(HybridModel):
    """A model whose forward adds something."""

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return 2 * super().forward(*args, **kwargs)


def _with(**config: Any) -> Any:
    model = make_model(hybrid_cell("M*E", mtp=1))
    for name, value in config.items():
        setattr(model.config, name, value)
    return model


def _of_class(model_class: type) -> Any:
    model = make_model(hybrid_cell("*E"))
    model.__class__ = model_class
    return model


def _with_own_stack() -> Any:
    model: Any = make_model(hybrid_cell("*E"))
    model.decoder.forward = lambda *_, **__: None
    return model


_REFUSED = {
    "forward": (lambda: _of_class(_OwnForward), "_OwnForward.forward", "what it adds would be lost"),
    "stack": (_with_own_stack, "HybridStack.forward", "HybridStack overrides forward"),
    "graphs": (lambda: _with(cuda_graph_impl="local"), "cuda_graph_impl", "use one of 'none', 'full_iteration'"),
    "depths": (lambda: _with(mtp_num_layers=2), "mtp_num_layers", "mtp_num_layers is 2, and the layer pattern has 1"),
    "fp8 in MTP": (lambda: _with(fp8="hybrid", fp8_recipe="tensorwise"), "fp8", "leave MTP out"),
    "delayed": (lambda: _with(fp8="hybrid", fp8_recipe="delayed"), "fp8_recipe", "use another recipe"),
}


@pytest.mark.parametrize("name", _REFUSED)
def test_refused_when_the_plan_is_built(name: str) -> None:
    """With field and value; under ``schedule()`` too, on entering."""
    make, field, wanted = _REFUSED[name]
    model = make()
    with pytest.raises(UnsupportedLayerError, match=wanted) as raised:
        ChunkPlan.build(model)
    assert raised.value.field == field
    with pytest.raises(UnsupportedLayerError, match=wanted) as entered, schedule(model):
        pass
    assert field in {violation.field for violation in entered.value.violations}


def test_batches_are_those_of_its_forward() -> None:
    """Arguments of ``GPTModel.forward`` that this model does not have are refused."""
    bench = Bench(FEATURES["attention-moe"])
    with pytest.raises(
        BatchError, match=r"extra_block_kwargs, which HybridModel.forward does not take; it takes input_"
    ):
        bench.chunk().open({**bench.batches()[0], "extra_block_kwargs": None})
    with pytest.raises(UnsupportedLayerError, match="batch has inference_context"):
        bench.chunk().open({**bench.batches()[0], "inference_context": object()})


def test_decoder_input_in_place_of_tokens() -> None:
    """As ``HybridModel.forward`` takes it."""
    bench = Bench(FEATURES["every-kind"])
    batch = bench.batches()[0]
    embedded = torch.randn(8, 2, 32, generator=torch.Generator().manual_seed(2))
    plain, ours = (embedded.clone().requires_grad_() for _ in range(2))
    output = bench.model(**batch, decoder_input=plain)
    output.backward(torch.ones_like(output))
    with Runner(streams="inline") as runner:
        order = schedules.serial(bench.chunk().shape, 1)
        result = runner.run(order, bench.chunk(), [{**batch, "decoder_input": ours}])
    assert torch.equal(output.detach(), result.outputs[0])
    assert plain.grad is not None
    assert torch.equal(plain.grad, result.input_grads[0])


def test_a_failed_pre_process_leaves_the_input_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the pipeline set on the decoder stands there again, and no tensor of the microbatch."""
    bench = Bench(FEATURES["last-chunk"])

    def fail(*_: Any, **__: Any) -> int:
        raise RuntimeError("planted")

    monkeypatch.setattr(bench.model.rotary_pos_emb, "get_rotary_seq_len", fail)
    before = bench.model.decoder.input_tensor
    with Runner(streams="inline") as runner, pytest.raises(StepError, match="planted"):
        runner.run(schedules.serial(bench.chunk().shape, 1), bench.chunk(), bench.batches()[:1])
    assert bench.model.decoder.input_tensor is before


@pytest.mark.parametrize("group", [False, True])
@pytest.mark.parametrize("name", ["every-kind", "mtp-two-tied", "last-chunk", "first-chunk", "empty-whole"])
def test_hooks_fire_as_in_the_plain_model(name: str, group: bool) -> None:
    """On the stack, its layers, MoE layers, the MTP block, its layers and their stacks: calls, values and changes."""
    bench = Bench(FEATURES[name], group=group)
    watched = {
        n: m
        for n, m in bench.model.named_modules()
        if n in ("decoder", "mtp") or n.rpartition(".")[0].endswith("layers") or n.endswith((".mlp", "mtp_model_layer"))
    }
    events: dict[str, list[Any]] = defaultdict(list)

    def note(module_name: str) -> Any:
        def hook(module: Any, args: Any, kwargs: Any, output: Any) -> Any:
            value = output[0] if isinstance(output, tuple) else output
            events[module_name].append((sorted(kwargs), value.detach().clone()))
            if not isinstance(output, tuple):
                return output * 1.5
            return (output[0] * 1.5, *output[1:])

        return hook

    handles = [module.register_forward_hook(note(n), with_kwargs=True) for n, module in watched.items()]
    plain = bench._run_plain()
    expected, events = {n: list(of) for n, of in events.items()}, defaultdict(list)
    bench.plain = plain
    order = schedules.serial(bench.chunk().shape, len(bench.microbatches))
    assert bench.check(order) == []
    assert expected.keys() == events.keys()
    for module_name, of_module in expected.items():
        for (names, value), (own_names, own_value) in zip(of_module, events[module_name], strict=True):
            assert names == own_names, module_name
            assert torch.equal(value, own_value), module_name
    for handle in handles:
        handle.remove()
