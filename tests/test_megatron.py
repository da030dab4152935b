"""The drop-in: Megatron-Core's own schedule plan on our nodes equals the plain model, bit for bit."""

from __future__ import annotations

import gc
import inspect
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.models.common import fine_grained_callables as common_callables
from megatron.core.models.common import utils as common_utils
from megatron.core.models.common.model_chunk_schedule_plan import TransformerModelChunkSchedulePlan
from megatron.core.models.gpt import fine_grained_callables as gpt_callables
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.transformer_block import TransformerBlock
from megatron.core.transformer.transformer_layer import TransformerLayer
from megatron.core.utils import get_attr_wrapped_model
from torch import Tensor, nn

import layernodes
from layernodes import (
    ArgumentError,
    ChunkPlan,
    ExpertNode,
    LayerPlan,
    NodeStateError,
    Runner,
    Slot,
    StepError,
    UnsupportedLayerError,
    schedules,
)
from layernodes._megatron.layer_pass import LayerPass
from layernodes.nodes import base, copies
from layernodes.plan import forward_funcs
from tests.support.build import make_microbatches, make_model
from tests.support.compare import run_cell
from tests.support.configs import CELLS, Cell, by_name
from tests.support.configurations import Results
from tests.support.fixtures import MEGATRON_WORLD, megatron_world  # noqa: F401
from tests.support.further import FURTHER
from tests.support.handed import HANDED, handed_over
from tests.support.own_dispatcher import OWN_DISPATCHER
from tests.support.slots import assert_equal_gradients
from tests.support.world import LAYERNODES, run_cells, use_layout

pytestmark = MEGATRON_WORLD

_FUNCTIONS = {
    "build_transformer_layer_callables": gpt_callables,
    "build_mtp_layer_callables": common_callables,
    "build_layer_callables": common_callables,
    "get_layer_moe_metadata": common_callables,
}


def _moe_model() -> Any:
    return make_model(by_name("alltoall-moe-ep1"))


class TestDropIn:
    """The four functions have Megatron-Core's names, parameters and results."""

    @pytest.mark.parametrize("name", _FUNCTIONS)
    def test_parameters(self, name: str) -> None:
        """Same parameter names, kinds and defaults as the installed megatron-core's."""
        theirs = inspect.signature(getattr(_FUNCTIONS[name], name)).parameters
        ours = inspect.signature(getattr(layernodes, name)).parameters
        assert [(p.name, p.kind, p.default) for p in ours.values()] == [
            (p.name, p.kind, p.default) for p in theirs.values()
        ]

    @pytest.mark.parametrize("name", ["alltoall-moe-ep1", "dense", "mixed-ep1", "mtp-aux-ep1", "experts4-x"])
    def test_metadata(self, name: str) -> None:
        """``get_layer_moe_metadata`` says what Megatron's says, of every layer."""
        model = make_model(by_name("alltoall-experts4-ep1" if name == "experts4-x" else name))
        for layer in (*model.decoder.layers, *(model.mtp.layers if getattr(model, "mtp", None) else ())):
            expected = common_callables.get_layer_moe_metadata(layer)
            assert layernodes.get_layer_moe_metadata(layer) == expected

    def test_results(self) -> None:
        """Five callables and a dict of two hooks or lists, from each builder."""
        model = make_model(by_name("mtp-aux-ep1"))
        for build, layer in (
            (layernodes.build_transformer_layer_callables, model.decoder.layers[0]),
            (layernodes.build_layer_callables, model.decoder.layers[0]),
            (layernodes.build_mtp_layer_callables, model.mtp.layers[0]),
            (layernodes.build_layer_callables, model.mtp.layers[0]),
        ):
            funcs, hooks = build(layer)
            assert len(funcs) == 5
            assert set(hooks) == {"pre_dispatch_computation", "mlp"}

    def test_each_builder_takes_its_kind(self) -> None:
        """The two specific builders refuse the other kind and name the one that takes both."""
        model = make_model(by_name("mtp-aux-ep1"))
        message = "expected a MultiTokenPredictionLayer, found TransformerLayer; build_layer_callables takes both"
        with pytest.raises(UnsupportedLayerError, match=message) as caught:
            layernodes.build_mtp_layer_callables(model.decoder.layers[0])
        assert (caught.value.field, caught.value.value) == ("layer", TransformerLayer)
        with pytest.raises(UnsupportedLayerError, match="expected a TransformerLayer, found MultiTokenPredictionLayer"):
            layernodes.build_transformer_layer_callables(model.mtp.layers[0])

    def test_not_a_layer(self) -> None:
        """Anything else is refused by all four."""
        for name in _FUNCTIONS:
            with pytest.raises(
                UnsupportedLayerError, match="Linear is no TransformerLayer and no MultiTokenPrediction"
            ):
                getattr(layernodes, name)(nn.Linear(2, 2))

    def test_a_model_for_a_layer(self) -> None:
        """Told where its layers are."""
        with pytest.raises(UnsupportedLayerError, match=r"GPTModel is a model, .* one of model.decoder.layers"):
            LayerPlan.build(_moe_model())


def _patched() -> dict[str, object]:
    owners = {
        gpt_callables: ("build_transformer_layer_callables",),
        common_callables: tuple(_FUNCTIONS),
        common_utils: ("TransformerLayerNode", "PreProcessNode", "PostProcessNode"),
        TransformerModelChunkSchedulePlan: tuple(TransformerModelChunkSchedulePlan.__dict__),
    }
    return {f"{owner.__name__}.{name}": owner.__dict__[name] for owner, names in owners.items() for name in names}


class TestInstall:
    """``install()`` is there while it is entered and leaves no trace."""

    def test_restores_everything(self) -> None:
        """Every patched attribute is the very object that it was."""
        before = _patched()
        with layernodes.install() as installation:
            assert installation.active
            during = _patched()
        assert not installation.active
        assert {name for name in before if before[name] is not during[name]} >= {
            f"{common_callables.__name__}.build_layer_callables",
            f"{common_utils.__name__}.TransformerLayerNode",
        }
        after = _patched()
        assert all(before[name] is after[name] for name in before)

    def test_restores_after_an_exception(self) -> None:
        """Also where the body raises."""
        before = _patched()
        with pytest.raises(ZeroDivisionError), layernodes.install():
            raise ZeroDivisionError
        assert all(value is _patched()[name] for name, value in before.items())

    def test_start_and_stop(self) -> None:
        """The same without a ``with``; stopping twice does no harm, starting again works."""
        before = _patched()
        installation = layernodes.install()
        for _ in range(2):
            assert installation.start() is installation
            assert installation.active
            installation.stop()
            installation.stop()
            assert all(value is _patched()[name] for name, value in before.items())

    def test_nesting_is_refused(self) -> None:
        """A second installation would restore the first one's names."""
        before = _patched()
        with layernodes.install() as outer:
            for other in (outer, layernodes.install()):
                with pytest.raises(NodeStateError, match="installed in Megatron-Core already; leave the other install"):
                    other.start()
            assert outer.active
        assert all(value is _patched()[name] for name, value in before.items())

    def test_a_layers_plan_is_built_once(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """And reused by every microbatch."""
        built = []
        build = LayerPlan.build
        monkeypatch.setattr(
            LayerPlan, "build", staticmethod(lambda layer, **kw: (built.append(layer), build(layer, **kw))[1])
        )
        verdict = run_cell(by_name("five-microbatches-ep1"), layernodes.install)
        assert verdict.status == "right"
        assert len(built) == len({id(layer) for layer in built}) == 4  # a model of two layers for each of two orders

    def test_a_schedule_of_ones_own_nodes(self) -> None:
        """``install(build)`` runs plans of the user's making."""
        model, (microbatch, *_) = _moe_model(), make_microbatches(by_name("alltoall-moe-ep1"))
        plans: list[LayerPlan] = []

        def build(layer: nn.Module) -> LayerPlan:
            plans.append(LayerPlan.build(layer, split_combine=True))
            return plans[-1]

        expected = model(**microbatch.inputs)
        with layernodes.install(build):
            plan = model.build_schedule_plan(**microbatch.inputs)
            assert torch.equal(type(plan).run(plan, None), expected)
        assert len(plans) == 2

    def test_no_plan(self) -> None:
        """What builds no plan is refused: before the context where that is seen, else at the first layer."""
        with pytest.raises(ArgumentError, match="build is of type dict, .*write install\\(lambda layer: "):
            layernodes.install({Slot.MLP: ExpertNode})  # type: ignore[arg-type]
        model, (microbatch, *_) = _moe_model(), make_microbatches(by_name("alltoall-moe-ep1"))
        for build, found in ((lambda layer: None, "None"), (ExpertNode, "of type ExpertNode")):
            refused = pytest.raises(ArgumentError, match=f"what build returned is {found}, .*write install")
            with layernodes.install(build), refused:  # type: ignore[arg-type]
                model.build_schedule_plan(**microbatch.inputs)


class _OwnForward(TransformerLayer):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs)


class _OwnMoEForward(MoELayer):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs)


class _OwnDecoderForward(TransformerBlock):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs)


class TestRefusals:
    """What the split path would not do as the plain layer does is refused before anything runs."""

    @staticmethod
    def _refused(layer: Any, message: str, field: str) -> None:
        with pytest.raises(UnsupportedLayerError, match=message) as caught:
            layernodes.build_layer_callables(layer)
        assert caught.value.field == field
        assert isinstance(caught.value, TypeError)

    def test_cross_attention(self) -> None:
        """A layer of an encoder-decoder model."""
        layer = _moe_model().decoder.layers[0]
        layer.cross_attention = nn.Linear(2, 2)
        self._refused(layer, r"layer 1 has cross-attention \(Linear\), which is not handled", "cross_attention")

    def test_overridden_forward(self) -> None:
        """A subclass whose own forward would be skipped."""
        layer = _moe_model().decoder.layers[0]
        layer.__class__ = _OwnForward
        self._refused(
            layer, r"_OwnForward overrides forward\(\), which the split path does not call", "_OwnForward.forward"
        )

    def test_overridden_moe_forward(self) -> None:
        """Of the MoE layer too."""
        layer = _moe_model().decoder.layers[0]
        layer.mlp.__class__ = _OwnMoEForward
        self._refused(layer, r"_OwnMoEForward overrides forward\(\)", "_OwnMoEForward.forward")

    def test_overridden_forward_on_the_instance(self) -> None:
        """And where the method was replaced on the object itself."""
        layer = _moe_model().decoder.layers[0]
        layer.forward = lambda *args, **kwargs: None
        self._refused(layer, r"TransformerLayer overrides forward\(\)", "TransformerLayer.forward")

    def test_tensor_parallel_without_sequence_parallel(self) -> None:
        """The plain layer refuses to train so; in evaluation it runs."""
        layer = _moe_model().decoder.layers[0]
        layer.mlp.attn_tp_group = SimpleNamespace(size=lambda: 2)
        self._refused(
            layer, "cannot be trained without sequence parallelism, the plain layer refuses", "sequence_parallel"
        )
        funcs, _ = layernodes.build_layer_callables(layer.eval())
        layer.train()
        with pytest.raises(UnsupportedLayerError, match="cannot be trained without sequence parallelism"):
            funcs[0]._parts.route(LayerPass(layer=layer), torch.ones(1))

    def test_latent_with_overlapped_shared_experts(self) -> None:
        """The plain layer refuses it."""
        layer = make_model(by_name("latent-shared-ep1")).decoder.layers[0]
        layer.mlp.shared_expert_overlap = True
        self._refused(layer, "latent MoE cannot overlap its shared experts", "moe_shared_expert_overlap")

    def test_an_mtp_layer_over_something_else(self) -> None:
        """Its inner layer must be a TransformerLayer."""
        layer = make_model(by_name("mtp-aux-ep1")).mtp.layers[0]
        layer.mtp_model_layer = nn.Linear(2, 2)
        self._refused(
            layer, r"over Linear is not handled; its inner layer \(mtp_model_layer\) must be", "mtp_model_layer"
        )

    def test_delayed_fp8_scaling(self) -> None:
        """Delayed scaling updates once a block, which no slot could do."""
        layer = _moe_model().decoder.layers[0]
        layer.config.fp8, layer.config.fp8_recipe = "hybrid", "delayed"
        self._refused(layer, "fp8_recipe='delayed' .* use another recipe", "fp8_recipe")

    def test_unknown_block_arguments(self) -> None:
        """Arguments of the decoder that its layers would not be given."""
        model, (microbatch, *_) = _moe_model(), make_microbatches(by_name("alltoall-moe-ep1"))
        with (
            layernodes.install(),
            pytest.raises(UnsupportedLayerError, match=r"extra_block_kwargs\['context'\]") as caught,
        ):
            model.build_schedule_plan(**microbatch.inputs, extra_block_kwargs={"context": torch.ones(2)})
        assert caught.value.field == "extra_block_kwargs.context"

    @pytest.mark.parametrize("mtp", [0, 1])
    @pytest.mark.parametrize("way", ["install", "runner"])
    def test_what_the_plain_model_cannot_run(self, way: str, mtp: int) -> None:
        """A padding mask for routers with expert bias, on which the plain model fails: refused by name, with no module
        called, no number drawn and no gradient left; of several microbatches whichever has it, and the others run."""
        cell = replace(by_name("expert-bias-padding-ep1"), layers="DM", mtp=mtp, num_microbatches=2)
        model, microbatches = make_model(cell), make_microbatches(cell)
        with pytest.raises(RuntimeError, match="size of tensor"):
            model(**microbatches[1].inputs)
        model = make_model(cell)
        if mtp:
            model.decoder.layers[1].mlp.router.enable_expert_bias = False  # only the router inside MTP is in the way
        sound = {name: value for name, value in microbatches[0].inputs.items() if name != "padding_mask"}
        called: list[str] = []
        for name, module in model.named_modules():
            module.register_forward_pre_hook(lambda *_, name=name: called.append(name))
        before = {name: buffer.clone() for name, buffer in model.named_buffers()}, torch.get_rng_state()
        with pytest.raises(
            UnsupportedLayerError, match="a router with expert bias cannot take a padding mask"
        ) as caught:
            _run_batches(way, model, [sound, microbatches[1].inputs], refused=1)
        assert (caught.value.field, caught.value.value) == ("moe_router_enable_expert_bias", True)
        assert called == []
        assert torch.equal(torch.get_rng_state(), before[1])
        assert all(torch.equal(buffer, before[0][name]) for name, buffer in model.named_buffers())
        assert all(parameter.grad is None for parameter in model.parameters())
        _run_batches(way, model, [sound])
        assert called != []

    @pytest.mark.parametrize("way", ["install", "runner"])
    @pytest.mark.parametrize("mtp", [0, 1])
    def test_a_padding_mask_for_expert_bias_without_gradients(self, way: str, mtp: int) -> None:
        """The plain model counts no tokens then, and runs; so do we, in any order of microbatches."""
        cell = replace(by_name("expert-bias-padding-ep1"), layers="DM", mtp=mtp, num_microbatches=2)
        model, microbatches = make_model(cell), make_microbatches(cell)
        with torch.no_grad():
            expected = [model(**microbatch.inputs) for microbatch in microbatches]
        if way == "runner":
            chunk = ChunkPlan.build(model)
            with Runner(streams="threads") as runner:
                batches = [dict(microbatch.inputs) for microbatch in microbatches]
                outputs = list(runner.run(schedules.forward_only(chunk.shape, 2), chunk, batches).outputs)
        else:
            with torch.no_grad(), layernodes.install():
                outputs = [_run(model, microbatch) for microbatch in microbatches]
        for output, wanted in zip(outputs, expected, strict=True):
            assert torch.equal(output, wanted)

    @pytest.mark.parametrize(
        ("frozen", "norm"),
        [
            (("embedding",), "layer 1 recomputes its input_layernorm"),
            (("embedding", r"layers\.0\.self_attention"), "layer 1 recomputes its pre_mlp_layernorm"),
            (("embedding", r"layers\.0\."), "layer 2 recomputes its input_layernorm"),
        ],
    )
    @pytest.mark.parametrize("way", ["install", "runner"])
    def test_a_recomputed_norm_that_no_gradient_reaches(self, way: str, frozen: tuple[str, ...], norm: str) -> None:
        """The plain model fails in the middle of its backward; without gradients, it and we run."""
        cell = replace(by_name("alltoall-recompute-layernorm-ep1"), frozen=frozen, layers="DM", num_microbatches=1)
        model, (microbatch,) = make_model(cell), make_microbatches(cell)
        with pytest.raises(TypeError, match="missing 1 required positional argument"):
            model(**microbatch.inputs).backward(microbatch.output_grad)
        model = make_model(cell)
        called: list[Any] = []
        model.embedding.register_forward_pre_hook(lambda module, _: called.append(module))
        with pytest.raises(UnsupportedLayerError, match=f"{norm}, to whose input no gradient flows") as caught:
            _run_batches(way, model, [microbatch.inputs], refused=0)
        assert (caught.value.field, caught.value.value) == ("recompute_modules", ["layernorm"])
        assert called == []
        with torch.no_grad(), layernodes.install():
            assert torch.equal(_run(model, microbatch), model(**microbatch.inputs))

    @pytest.mark.parametrize("frozen", [(r"embedding.position",), ("embedding", "self_attention", "mlp")])
    def test_a_recomputed_norm_that_a_gradient_reaches_or_that_nobody_needs(self, frozen: tuple[str, ...]) -> None:
        """Part of the embedding trains; or nothing behind the norms does, and the norms train as in the plain model."""
        cell = replace(by_name("alltoall-recompute-layernorm-ep1"), frozen=frozen, position="learned_absolute")
        _check(cell)

    @pytest.mark.parametrize("on_the_instance", [False, True])
    def test_a_decoder_with_a_forward_of_its_own(self, on_the_instance: bool) -> None:
        """Refused where the plan is built: under ``install()`` and as a chunk plan."""
        model, (microbatch, *_) = _moe_model(), make_microbatches(by_name("alltoall-moe-ep1"))
        if on_the_instance:
            model.decoder.forward = lambda *args, **kwargs: None
        else:
            model.decoder.__class__ = _OwnDecoderForward
        name = type(model.decoder).__name__
        with layernodes.install(), pytest.raises(UnsupportedLayerError, match=rf"{name} overrides forward\(\)") as one:
            model.build_schedule_plan(**microbatch.inputs)
        with pytest.raises(UnsupportedLayerError, match="which the split path does not call") as two:
            ChunkPlan.build(model)
        assert one.value.field == two.value.field == f"{name}.forward"


def _run_batches(way: str, model: Any, batches: Sequence[Any], *, refused: int | None = None) -> None:
    """Forward and backward of each batch. Under ``install()`` a plan is built a microbatch, so only that of the
    ``refused`` one is."""
    if way == "runner":
        chunk = ChunkPlan.build(model)
        with Runner(streams="inline") as runner:
            runner.run(schedules.serial(chunk.shape, num_microbatches=len(batches)), chunk, [dict(b) for b in batches])
        return
    with layernodes.install():
        for batch in batches if refused is None else [batches[refused]]:
            plan = model.build_schedule_plan(**batch)
            output = type(plan).run(plan, None)
            type(plan).run(None, plan, b_grad=torch.ones_like(output))


def _check(cell: Cell, context: Any = layernodes.install, *, hooks: bool = False) -> None:
    use_layout(cell)
    verdict = run_cell(cell, context, hooks=hooks)
    assert verdict.status == "right", verdict
    assert Results.load().contradicted([(cell, verdict)], "layernodes") == {}


_IN_PROCESS = (
    *("dense", "dense-dropout", "dense-tied", "alltoall-shared-gate-ep1", "allgather-aux-ep1", "allgather-paired-ep1"),
    *("paired-recompute-ep1", "paired-mixed-ep1", "shared-overlap-ep1", "drop-pad-ep1", "expert-bias-ep1", "mixed-ep1"),
    *(
        "alltoall-dropout-ep1",
        "bf16-dropout-shared-ep1",
        "recompute-all-dropout-ep1",
        "recompute-moe-ep1",
        "latent-ep1",
    ),
    *("mla-recompute-all-ep1", "packed-samples-ep1", "middle-chunk-ep1", "last-chunk-dense-last-ep1", "one-layer-ep1"),
    *("frozen-embedding-ep1", "frozen-first-layer-ep1", "mlp-chunks-ep1", "delay-wgrad-mixed-ep1", "uneven-ep1"),
    *("early-attention-release-ep1", "padding-aux-x", "hybridep-shared-aux-ep1", "heterogeneous-everything-ep1"),
    *("mtp-padding-aux-ep1", "mtp-tied-ep1", "mtp-two-ep1", "mtp-repeated-ep1", "mtp-detach-heads-ep1", "mtp-bf16-ep1"),
)
_IN_PAIRS = (
    *("alltoall-moe-ep2", "alltoall-experts1-ep2", "allgather-paired-ep2", "paired-shared-ep2", "shared-overlap-ep2"),
    *("deepep-shared-aux-ep2", "deepep-paired-ep2", "hybridep-recompute-ep2", "mtp-tied-ep2", "mtp-repeated-ep2"),
    *("idle-rank", "idle-rank-deepep", "drop-pad-ep2", "recompute-all-dropout-ep2", "global-aux-padding-ep2"),
    *("tp2-ep2-etp1-alltoall-dropout", "tp2-ep1-etp2-allgather-paired", "tp2-mtp-dropout", "tp2-dense-dropout"),
)
_FURTHER_IN_PAIRS = (
    *("deepep-ep2-overlap-gate", "hybridep-ep2-overlap-paired", "full-uniform-mtp", "full-block-expert-bias"),
    *("chunks-allgather-shared-ep2", "mtp-two-tied-four", "mtp-repeated-tied-four", "chunks-recompute"),
)


def _named(name: str) -> Cell:
    if name == "padding-aux-x":
        return by_name("alltoall-padding-aux-ep1")
    return next(cell for cell in (*CELLS, *FURTHER) if cell.name == name)


class TestMatrix:
    """Outputs, losses, gradients, buffers, generators and metrics equal the plain model's under ``install()``."""

    @pytest.mark.parametrize("name", _IN_PROCESS)
    def test_one_rank(self, name: str) -> None:
        """Configurations of one rank, in every order of microbatches; forward hooks fire as often."""
        _check(_named(name), hooks=True)

    def test_two_ranks(self) -> None:
        """Expert and tensor parallel configurations, in worker processes."""
        for names, hooks in ((_IN_PAIRS, True), (_FURTHER_IN_PAIRS, False)):
            verdicts = run_cells([_named(name) for name in names], LAYERNODES, hooks=hooks)
            assert Results.load().contradicted(((_named(name), v) for name, v in verdicts.items()), "layernodes") == {}
            assert {name: verdict for name, verdict in verdicts.items() if verdict.status != "right"} == {}
            assert len(verdicts) == len(names)

    def test_three_mtp_layers_with_rms_norms(self) -> None:
        """Whose backward hands the gradients of a depth on in another order than layer norms do."""
        cell = replace(by_name("mtp-two-ep1"), mtp=3, batch=1, tied=True, orders=("serial", "1f1b"))
        _check(cell.with_config(normalization="RMSNorm"))

    def test_one_chunk_gets_no_padding_mask(self) -> None:
        """A layer that chunks its MoE half hands no mask on, where one token a sequence makes but one chunk too."""
        cell = replace(_named("padding-aux-x"), seq=1, batch=3, name="chunks-seq1-padding")
        _check(cell.with_config(mlp_chunks_for_training=2))

    def test_an_all_gather_dispatcher_of_ones_own(self) -> None:
        """A subclass still gathers into the buffer that all of the process shares; two microbatches are in flight."""
        names = ("allgather-paired-ep2", "tp2-ep1-etp2-allgather-paired", "allgather-recompute-layernorm-ep2")
        verdicts = run_cells([_named(name) for name in names], OWN_DISPATCHER)
        assert {name: verdict.status for name, verdict in verdicts.items()} == dict.fromkeys(names, "right")

    @pytest.mark.full
    @pytest.mark.timeout(3600)
    @pytest.mark.parametrize("hooks", [False, True], ids=["", "hooks"])
    def test_every_cell(self, hooks: bool) -> None:
        """The whole matrix: right wherever the plain model itself runs."""
        # Under full recompute the plain model calls its layers a second time, in backward; the nodes do not.
        cells = [cell for cell in (*CELLS, *FURTHER) if not (hooks and cell.name.startswith("full-"))]
        verdicts = run_cells(cells, LAYERNODES, hooks=hooks)
        wrong = {name: v for name, v in verdicts.items() if v.status not in ("right", "unrunnable")}
        assert wrong == {}
        assert Results.load().contradicted(((cell, verdicts[cell.name]) for cell in cells), "layernodes") == {}
        assert sum(v.status == "right" for v in verdicts.values()) > len(cells) - 10  # the plain model runs nearly all


# What Megatron-Core's own plan gets wrong around any nodes: parameters used twice, frozen embeddings, repeated MTP.
_NOT_THE_NODES = ("mtp", "tied", "frozen", "heterogeneous", "chunks-mtp", "full-uniform-mtp")

# Of these, what is right with one microbatch: its plan crashes on a first node without gradient, and on repeated MTP.
_ITS_PLAN_CRASHES = ("frozen-embedding", "frozen-first-layer", "frozen-all-but-router", "mtp-repeated")
_ONE_MICROBATCH = tuple(
    cell.name
    for cell in CELLS
    if cell.ep == cell.tp == 1
    and any(part in cell.name for part in _NOT_THE_NODES)
    and not any(part in cell.name for part in _ITS_PLAN_CRASHES)
)

_COPIED = (
    *("alltoall-moe-ep1", "alltoall-experts1-ep1", "alltoall-shared-gate-ep1", "allgather-moe-ep1", "latent-ep1"),
    *("recompute-all-ep1", "hybridep-ep1", "paired-mixed-ep1"),
)


def _count_copies(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Count the tensors that nodes copy, by ``copied`` and by ``own``, through which ``owned`` and ``put`` go."""
    found: Counter[str] = Counter()
    copied, own = copies.copied, copies.own

    def counted_copied(inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        found["inputs"] += len(inputs)
        return copied(inputs)

    def counted_own(tensor: Tensor) -> Tensor:
        mine = own(tensor)
        found["outputs and handoffs"] += mine is not tensor
        return mine

    for module in (copies, forward_funcs):
        monkeypatch.setattr(module, "copied", counted_copied)
    for module in (copies, base):
        monkeypatch.setattr(module, "own", counted_own)
    return found


class TestHandedOver:
    """Without ``install()``: our callables under Megatron-Core's own node class, which frees storage by slot name."""

    @pytest.mark.parametrize(
        "name",
        [name for name in _IN_PROCESS if not any(part in name for part in _NOT_THE_NODES)],
    )
    def test_one_rank(self, name: str) -> None:
        """EP=1 and ``allgather`` too, where freeing by name empties what is still used: there the nodes copy."""
        _check(_named(name), handed_over)

    @pytest.mark.parametrize("name", _ONE_MICROBATCH)
    def test_one_microbatch(self, name: str) -> None:
        """Parameters used twice and frozen ones, as far as Megatron-Core's plan is right there: one microbatch."""
        _check(replace(_named(name), num_microbatches=1, orders=("serial",)), handed_over)

    def test_two_ranks(self) -> None:
        """EP=2, where most is freed without a copy."""
        names = [name for name in _IN_PAIRS if not any(part in name for part in _NOT_THE_NODES)]
        verdicts = run_cells([_named(name) for name in names], HANDED)
        assert {name: verdict for name, verdict in verdicts.items() if verdict.status != "right"} == {}

    @pytest.mark.parametrize("name", _COPIED)
    def test_nothing_is_copied_under_install(self, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """Under ``install()`` no node works on or hands on a copy; handed over, the same configuration does."""
        found = _count_copies(monkeypatch)
        _check(_named(name), layernodes.install)
        assert found == Counter()
        _check(_named(name), handed_over)
        assert found["inputs"] + found["outputs and handoffs"] > 0

    @pytest.mark.full
    @pytest.mark.timeout(3600)
    def test_every_cell(self) -> None:
        """The whole matrix but for what Megatron-Core's plan itself gets wrong."""
        cells = [c for c in (*CELLS, *FURTHER) if not any(part in c.name for part in _NOT_THE_NODES)]
        verdicts = run_cells(cells, HANDED)
        wrong = {name: v for name, v in verdicts.items() if v.status not in ("right", "unrunnable")}
        assert wrong == {}


def _run(model: Any, microbatch: Any, **inputs: Any) -> Tensor:
    plan = model.build_schedule_plan(**microbatch.inputs, **inputs)
    output: Tensor = type(plan).run(plan, None)
    return output


class TestModel:
    """A whole model's microbatch, beyond the matrix."""

    @pytest.mark.parametrize(
        "name", ["mtp-tied-ep1", "recompute-all-ep1", "alltoall-shared-gate-ep1", "allgather-moe-ep1"]
    )
    def test_nothing_survives_a_microbatch(self, name: str) -> None:
        """With ``gc`` off, the plan's tensors are gone as soon as its backward is."""
        cell = by_name(name)
        model, microbatches = make_model(cell), make_microbatches(cell)
        with layernodes.install():
            _forward_and_backward(model, microbatches[0])
            gc.collect()
            gc.disable()
            try:
                before = _live()
                references = _forward_and_backward(model, microbatches[1])
                assert [name for name, reference in references if reference() is not None] == []
                assert _live() - before == 0
            finally:
                gc.enable()

    def test_without_gradients(self) -> None:
        """Evaluation under ``torch.no_grad()``."""
        cell = by_name("mtp-tied-ep1")
        model, (microbatch, *_) = make_model(cell).eval(), make_microbatches(cell)
        with torch.no_grad():
            expected = model(**microbatch.inputs)
            with layernodes.install():
                assert torch.equal(_run(model, microbatch), expected)

    @pytest.mark.parametrize("way", ["plan", "runner"])
    def test_evaluation_does_not_chunk(self, way: str) -> None:
        """``mlp_chunks_for_training`` is for training: the router routes all tokens at once."""
        cell = by_name("mlp-chunks-ep1")
        model, (microbatch, *_) = make_model(cell).eval(), make_microbatches(cell)
        routed: Counter[Any] = Counter()
        routers = [module for name, module in model.named_modules() if name.endswith("mlp.router")]
        for router in routers:
            router.register_forward_hook(lambda module, *_: routed.update([module]))
        with torch.no_grad():
            expected = model(**microbatch.inputs)
            if way == "plan":
                with layernodes.install():
                    found = _run(model, microbatch)
            else:
                chunk = ChunkPlan.build(model)
                with Runner(streams="inline") as runner:
                    found = runner.run(schedules.forward_only(chunk.shape, 1), chunk, [microbatch.inputs]).outputs[0]
        assert torch.equal(found, expected)
        assert routed == dict.fromkeys(routers, 2)  # by the plain model, and by ours

    def test_a_wrapped_model(self) -> None:
        """Megatron's ``Float16Module`` hands its schedule plan on; the loss is the wrapped model's."""
        cell = by_name("bf16-ep1")
        model, (microbatch, *_) = make_model(cell), make_microbatches(cell)
        wrapped = Float16Module(model.config, model)
        expected = wrapped(**microbatch.inputs)
        inner = get_attr_wrapped_model(wrapped, "build_schedule_plan", return_model_obj=True)
        with layernodes.install():
            actual = _run(inner, microbatch)
        assert expected.dtype is actual.dtype is torch.float32
        assert torch.equal(actual, expected)

    @pytest.mark.parametrize("way", ["plan", "runner"])
    def test_output_processor(self, way: str) -> None:
        """It is given what the plain model gives it, context and embeddings; a gradient to these is refused, where
        it would bypass the layers."""
        cell = by_name("alltoall-moe-ep1")

        def processor(*, hidden_states: Tensor, decoder_input: Tensor, context: Any, **others: Any) -> Tensor:
            seen = decoder_input if context["differentiates"] else decoder_input.detach()
            logits, _ = others["output_layer"](hidden_states, weight=others["output_weight"])
            return logits + seen.sum(-1, keepdim=True) + others["position_ids"].T[..., None] * context["scale"]

        def run(plain: bool, context: Any) -> tuple[Tensor, dict[str, Tensor | None]]:
            model, (microbatch, *_) = make_model(cell), make_microbatches(cell)
            inputs = {**microbatch.inputs, "output_processor": processor, "output_processor_context": context}
            if plain:
                output = model(**inputs)
                output.backward(torch.ones_like(output))
            elif way == "plan":
                with layernodes.install():
                    plan = model.build_schedule_plan(**inputs)
                    output = type(plan).run(plan, None)
                    type(plan).run(None, plan, b_grad=torch.ones_like(output))
            else:
                chunk = ChunkPlan.build(model)
                with Runner(streams="inline") as runner:
                    output = runner.run(schedules.serial(chunk.shape, 1), chunk, [inputs]).outputs[0]
            return output.detach(), {name: p.grad for name, p in model.named_parameters()}

        context = {"scale": 0.5, "differentiates": False}
        expected, found = run(True, context), run(False, context)
        assert torch.equal(expected[0], found[0])
        assert_equal_gradients(expected[1], found[1])
        with pytest.raises((UnsupportedLayerError, StepError), match="differentiates through decoder_input"):
            run(False, {**context, "differentiates": True})

    @pytest.mark.parametrize("mtp", [0, 1])
    def test_attention_bias(self, mtp: int, monkeypatch: pytest.MonkeyPatch) -> None:
        """``extra_block_kwargs`` reaches the decoder's layers, and MTP's as in the plain model."""
        monkeypatch.setattr("tests.support.modules.OwnAttention.forward", _biased(monkeypatch))
        cell = replace(by_name("own-attention-ep1"), mtp=mtp)
        bias = torch.randn(1, 1, 8, 8, generator=torch.Generator().manual_seed(1))
        found = []
        for run in (lambda m, b: m(**b.inputs, extra_block_kwargs={"attention_bias": bias}), _with_bias(bias)):
            model, (microbatch, *_) = make_model(cell), make_microbatches(cell)
            output = run(model, microbatch)
            if isinstance(output, tuple):
                output = output[0]
            found.append((output.detach(), {n: p.grad for n, p in model.named_parameters()}))
        assert torch.equal(found[0][0], found[1][0])

    @pytest.mark.parametrize("fused", [False, True])
    def test_main_grad(self, fused: bool) -> None:
        """Gradients that a trainer moves into ``main_grad`` when they arrive are the plain ones, once each."""
        cell = by_name("mtp-tied-ep1")
        found = []
        for plain in (True, False):
            model, microbatches = make_model(cell), make_microbatches(cell)
            counts = _move_into_main_grad(model)
            for microbatch in microbatches:
                if plain:
                    model(**microbatch.inputs).backward(microbatch.output_grad)
                else:
                    with layernodes.install():
                        _forward_and_backward(model, microbatch)
            found.append(({n: p.main_grad.clone() for n, p in model.named_parameters()}, counts))
        assert found[0][1] == found[1][1]
        assert all(torch.equal(found[0][0][name], found[1][0][name]) for name in found[0][0])


class TestShapesOfChunks:
    """Chunks of different length in one pass, and chunks of one decoder layer or none."""

    @pytest.mark.parametrize(("forward_layers", "backward_layers"), [("MDM", "M"), ("D", "MMD"), ("M", "D")])
    def test_pairs_of_different_length(self, forward_layers: str, backward_layers: str) -> None:
        """The forward of one chunk runs against the backward of a shorter or longer one; each is its own plain run."""
        cells = [replace(by_name("alltoall-moe-ep1"), layers=layers) for layers in (forward_layers, backward_layers)]
        expected = [_plain_results(make_model(cell), make_microbatches(cell)[0]) for cell in cells]
        models = [make_model(cell) for cell in cells]
        first, second = (make_microbatches(cell)[0] for cell in cells)
        with layernodes.install():
            forward = models[0].build_schedule_plan(**first.inputs)
            backward = models[1].build_schedule_plan(**second.inputs)
            outputs = [type(backward).run(backward, None)]
            outputs.insert(0, type(forward).run(forward, backward, b_grad=second.output_grad))
            type(forward).run(None, forward, b_grad=first.output_grad)
        for model, output, (plain_output, grads) in zip(models, outputs, expected, strict=True):
            assert torch.equal(output, plain_output)
            assert_equal_gradients(grads, {name: p.grad for name, p in model.named_parameters()})

    @pytest.mark.parametrize("name", ["one-layer-ep1", "mtp-aux-ep1", "no-final-norm-ep1", "last-chunk-ep1"])
    def test_no_decoder_layer(self, name: str) -> None:
        """A chunk without decoder layers, with its final norm, with MTP: the norm is applied once."""
        cell = by_name(name)
        found = []
        for plain in (True, False):
            model, microbatch = make_model(cell), make_microbatches(cell)[0]
            model.decoder.layers = nn.ModuleList()
            calls = [0]
            if model.decoder.final_layernorm is not None:
                model.decoder.final_layernorm.register_forward_hook(lambda *_, c=calls: c.__setitem__(0, c[0] + 1))
            if microbatch.hidden_states is not None:
                model.set_input_tensor(microbatch.hidden_states)
            if plain:
                found.append((*_plain_results(model, microbatch), calls))
                continue
            with layernodes.install():
                plan = model.build_schedule_plan(**microbatch.inputs)
                output = type(plan).run(plan, None)
                type(plan).run(None, plan, b_grad=microbatch.output_grad)
            found.append((output.detach(), {n: p.grad for n, p in model.named_parameters()}, calls))
        assert torch.equal(found[0][0], found[1][0])
        assert_equal_gradients(found[0][1], found[1][1])
        assert found[0][2] == found[1][2]


def _plain_results(model: Any, microbatch: Any) -> tuple[Tensor, dict[str, Tensor | None]]:
    output = model(**microbatch.inputs)
    output.backward(microbatch.output_grad)
    return output.detach(), {name: p.grad for name, p in model.named_parameters()}


def _biased(monkeypatch: pytest.MonkeyPatch) -> Any:
    from tests.support.modules import OwnAttention  # noqa: PLC0415 - the class whose method is wrapped

    original = OwnAttention.forward

    def forward(self: Any, *args: Any, attention_bias: Tensor | None = None, **kwargs: Any) -> Tensor:
        output = original(self, *args, **kwargs)
        return output if attention_bias is None else output * attention_bias.mean().exp()

    return forward


def _with_bias(bias: Tensor) -> Callable[[Any, Any], Tensor]:
    def run(model: Any, microbatch: Any) -> Tensor:
        with layernodes.install():
            return _run(model, microbatch, extra_block_kwargs={"attention_bias": bias})

    return run


def _move_into_main_grad(model: Any) -> dict[str, int]:
    counts: dict[str, int] = {}
    for name, parameter in model.named_parameters():
        parameter.main_grad = torch.zeros_like(parameter)
        counts[name] = 0

        def move(p: Any, name: str = name) -> None:
            counts[name] += 1
            p.main_grad.add_(p.grad)
            p.grad = None

        parameter.register_post_accumulate_grad_hook(move)
    return counts


def _live() -> int:
    return sum(issubclass(type(value), Tensor) for value in gc.get_objects())


def _forward_and_backward(model: Any, microbatch: Any) -> list[tuple[str, Any]]:
    """One microbatch through the plan; weak references to what passed between its slots."""
    plan = model.build_schedule_plan(**microbatch.inputs)
    output = type(plan).run(plan, None)
    references: list[tuple[str, Any]] = [("output", weakref.ref(output)), ("chunk state", weakref.ref(plan.state))]
    for i in range(plan.num_layers()):
        layer = plan.get_layer(i)
        references.append((f"layer state {i}", weakref.ref(layer.layer_state)))
        for slot in ("pre_dispatch_computation", "moe_dispatch", "mlp", "moe_combine"):
            node = getattr(layer, slot)
            tensors = (*getattr(node, "inputs", ()), *getattr(node, "detached", ()))
            references += [(f"{slot} {i}", weakref.ref(t)) for t in tensors]
    type(plan).run(None, plan, b_grad=microbatch.output_grad.to(output.dtype))
    return references
