"""The low-precision contexts (fp8, fp4) at their seam: which layer's is entered around what, with a stand-in."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionLayer
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor

import layernodes
from layernodes import ChunkPlan, LayerPlan, Runner, schedules
from layernodes._megatron import layer_kinds
from tests.support import toy
from tests.support.build import make_microbatches, make_model
from tests.support.configs import by_name
from tests.support.fixtures import MEGATRON_WORLD, megatron_world  # noqa: F401
from tests.support.hybrid_cells import hybrid_cell

pytestmark = MEGATRON_WORLD

_FP8 = {"fp8": "hybrid", "fp8_recipe": "tensorwise"}


class _Precision:
    """The layers in whose low-precision context a forward is, and what was found to run in which."""

    def __init__(self, layers: Sequence[Any], monkeypatch: pytest.MonkeyPatch) -> None:
        self.layers = list(layers)
        self.entered: list[int] = []
        self.active: list[int] = []
        self.found: list[tuple[int, list[int]]] = []
        record = self

        @contextmanager
        def context(layer: Any) -> Iterator[None]:
            index = next(i for i, own in enumerate(record.layers) if own is layer)
            record.entered.append(index)
            record.active.append(index)
            yield
            record.active.pop()

        for kind in (TransformerLayer, MultiTokenPredictionLayer):
            monkeypatch.setattr(kind, "get_inner_quantization_context", context)
        for index, layer in enumerate(self.layers):
            inner = getattr(layer, "mtp_model_layer", layer)
            is_moe = isinstance(inner.mlp, MoELayer)
            parts = (inner.self_attention, inner.mlp.experts if is_moe else inner.mlp)
            for module in (part for part in parts if not isinstance(part, IdentityOp)):
                module.register_forward_pre_hook(lambda *_, i=index: record.found.append((i, list(record.active))))


class TestLowPrecision:
    """The low-precision context is the layer's own, entered around each slot by whoever runs the plan."""

    _CELL = replace(by_name("mtp-aux-ep1"), layers="DM", mtp=2)

    @classmethod
    def _model(cls, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, _Precision]:
        model = make_model(cls._CELL)
        return model, _Precision([*model.decoder.layers, *model.mtp.layers], monkeypatch)

    def test_under_install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Megatron's schedule plan enters ``get_inner_quantization_context`` of the very layer, also of MTP layers, for
        each of its five slots."""
        model, precision = self._model(monkeypatch)
        microbatch = make_microbatches(self._CELL)[0]
        with layernodes.install():
            plan = model.build_schedule_plan(**microbatch.inputs)
            output = type(plan).run(plan, None)
            forward = list(precision.entered)
            type(plan).run(None, plan, b_grad=microbatch.output_grad)
        assert forward == [index for index in range(4) for _ in range(5)]
        self._check(precision, output, microbatch)

    def test_under_the_runner(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The runner enters it once around each slot that a layer has, in forward only."""
        model, precision = self._model(monkeypatch)
        model.config.fp8, model.config.fp8_recipe = "hybrid", "tensorwise"
        microbatch = make_microbatches(self._CELL)[0]
        chunk = ChunkPlan.build(model)
        with layernodes.Runner(streams="inline") as runner:
            result = runner.run(
                layernodes.schedules.serial(chunk.shape, num_microbatches=1),
                chunk,
                [dict(microbatch.inputs)],
                [microbatch.output_grad],
            )
        slots = [sum(place.layer == index and place.node is not None for place in chunk.places) for index in range(4)]
        assert slots == [2, 4, 5, 5]
        assert precision.entered == [index for index, count in enumerate(slots) for _ in range(count)]
        self._check(precision, result.outputs[0], microbatch)

    def test_none_without_low_precision(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Where nothing is configured the runner enters none."""
        model, _ = self._model(monkeypatch)
        assert {place.precision for place in ChunkPlan.build(model).places} == {None}

    def _check(self, precision: _Precision, output: Tensor, microbatch: Any) -> None:
        assert precision.active == []
        assert sorted(precision.found) == [(index, [index]) for index in range(4) for _ in range(2)]
        assert torch.equal(output, make_model(self._CELL)(**microbatch.inputs))

    @pytest.mark.parametrize("joins", [False, True])
    def test_without_a_model(self, monkeypatch: pytest.MonkeyPatch, joins: bool) -> None:
        """``ChunkPlan.of`` stands in the block's place: each layer is under its own context alone, single or joined."""
        layers = list(make_model(hybrid_cell("*E", late_config=_FP8)).decoder.layers)
        precision = _Precision(layers, monkeypatch)
        plans = [LayerPlan.build(layer) for layer in layers]
        chunk = ChunkPlan.of([LayerPlan.join(plans)] if joins else plans)
        with Runner("inline") as runner:
            runner.run(schedules.serial(chunk.shape, 1), chunk, [torch.randn(6, 2, 32, requires_grad=True)])
        assert precision.active == []
        assert precision.found == [(0, [0]), (1, [1])]
        assert precision.entered == [0, 1, 1, 1, 1]

    def test_layers_of_ones_own(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Megatron-Core's configuration puts a layer under the block's context; another ``config`` does not."""
        numbers: list[int] = []

        def context(config: Any, number: int) -> Any:
            assert config.fp8
            numbers.append(number)
            return nullcontext()

        monkeypatch.setattr(layer_kinds, "get_fp8_context", context)
        config = make_model(hybrid_cell("*E", late_config=_FP8)).config
        numbered, unnumbered, other = toy.toys(3)
        numbered.config = unnumbered.config = config
        numbered.layer_number = 3
        other.config = SimpleNamespace(hidden_size=8)
        chunk = ChunkPlan.of([LayerPlan.build(layer, nodes=toy.NODES) for layer in (numbered, unnumbered, other)])
        x = torch.randn(2, 8, dtype=torch.float64)
        with Runner("inline") as runner:
            result = runner.run(schedules.serial(chunk.shape, 1), chunk, [x])
        assert torch.equal(result.outputs[0], other(unnumbered(numbered(x))))
        assert numbers == [2] * 4 + [-1] * 4
        config.fp8_recipe = "delayed"
        assert {place.precision for place in ChunkPlan.of(chunk.layers).places} == {None}
