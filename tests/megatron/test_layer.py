"""The parts of a layer that cannot run here for real, at their seams: CUDA graphs, offloading, NCCL EP, fp8."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from megatron.core.transformer.enums import CudaGraphModule
from megatron.core.transformer.module import GraphableMegatronModule
from megatron.core.transformer.moe import token_dispatcher
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.transformer_layer import TransformerLayer
from megatron.core.typed_torch import apply_module
from torch import Tensor, nn

import layernodes
from layernodes import LayerPlan, UnsupportedLayerError
from tests.support.build import make_microbatches, make_model
from tests.support.compare import run_cell
from tests.support.configs import Cell, by_name
from tests.support.fixtures import MEGATRON_WORLD, megatron_world  # noqa: F401
from tests.support.slots import SlotRun, assert_equal_gradients, gradients

pytestmark = MEGATRON_WORLD

_ATTENTION = [CudaGraphModule.attn]
_ROUTER = [CudaGraphModule.attn, CudaGraphModule.moe_router]
_PREPROCESS = [*_ROUTER, CudaGraphModule.moe_preprocess]


def _captured(self: Any, **kwargs: Any) -> tuple[Tensor, ...]:
    """What ``GraphableMegatronModule._te_cuda_graph_replay`` returns: the outputs of the captured part, run eagerly."""
    self.replays.append(kwargs)
    hidden, _ = self._forward_attention(**kwargs)
    modules = self.config.cuda_graph_modules
    if not self.is_moe_layer or CudaGraphModule.moe_router not in modules:
        return (hidden,)
    moe = self.mlp
    assert moe.cudagraph_tensor_store.is_empty()
    normed = apply_module(self.pre_mlp_layernorm)(hidden)
    shared = moe.shared_experts_compute(normed)
    probs, routing_map = moe.route(normed)
    outputs = [normed, probs, routing_map]
    if CudaGraphModule.moe_preprocess in modules:
        dispatcher = copy.copy(moe.token_dispatcher)  # a graph writes into its own memory, not on objects
        tokens, probs = dispatcher.dispatch_preprocess(normed, routing_map, probs)
        outputs = [tokens, probs, *(getattr(dispatcher, name) for name in dispatcher.valid_cudagraph_attrs)]
    return (*outputs, *([] if shared is None else [shared]), hidden)


def _graphed_layer(cell: Cell, modules: list[Any]) -> Any:
    layer = make_model(cell).decoder.layers[0]
    layer.config.cuda_graph_impl = "transformer_engine"
    layer.config.cuda_graph_modules = modules
    layer.config.overlap_moe_expert_parallel_comm = True
    graph = SimpleNamespace(num_wgrads=0)
    graph.backward_dw = lambda: setattr(graph, "num_wgrads", graph.num_wgrads + 1)
    layer.cuda_graphs = [graph]
    layer.current_microbatch = 0
    layer.replays = []
    if CudaGraphModule.moe_preprocess in modules:
        _capture_preprocess(layer.mlp)
    return layer


def _capture_preprocess(moe: MoELayer) -> None:
    """What capturing leaves on the dispatcher (``get_early_return_outputs``): the names of the attributes that a replay
    returns, and the attributes that are no tensors, of the shape captured."""
    dispatcher = moe.token_dispatcher
    dispatcher.cuda_dtoh_point = "before_ep_alltoall"
    with torch.no_grad():
        hidden = torch.randn(6, 2, 32)
        moe.preprocess(hidden, *moe.route(hidden))
    attributes = {name: getattr(dispatcher, name) for name in dispatcher.cudagraph_attrs if "." not in name}
    dispatcher.valid_cudagraph_attrs = [name for name, value in attributes.items() if isinstance(value, Tensor)]
    assert {"routing_map", "tokens_per_expert"} <= set(dispatcher.valid_cudagraph_attrs)


class TestCudaGraphs:
    """A layer with CUDA graphs replays them up to dispatch; the rest runs eagerly, as in Megatron's own callables."""

    @pytest.mark.parametrize("modules", [_ATTENTION, _ROUTER, _PREPROCESS], ids=["attn", "router", "preprocess"])
    @pytest.mark.parametrize("name", ["alltoall-moe-ep1", "alltoall-shared-ep1", "dense"])
    def test_replay(self, name: str, modules: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
        """The graph's outputs go on through the slots; outputs and gradients are the plain layer's."""
        monkeypatch.setattr(GraphableMegatronModule, "_te_cuda_graph_replay", _captured)
        cell = replace(by_name(name), position="none")
        layer = _graphed_layer(cell, modules if name != "dense" else _ATTENTION)
        x = torch.randn(6, 2, 32, requires_grad=True)
        grad = torch.randn(6, 2, 32)
        plan = LayerPlan.build(layer)
        run = SlotRun(plan)
        output = run.forward(x)
        input_grad = run.backward(grad)
        actual = gradients(layer)

        plain = make_model(cell).decoder.layers[0]
        expected, _ = plain(hidden_states=x, attention_mask=None)
        expected.backward(grad)
        assert torch.equal(output, expected)
        assert torch.equal(input_grad, x.grad)
        assert_equal_gradients(gradients(plain), actual)
        assert len(layer.replays) == 1
        assert set(layer.replays[0]) == {
            *("hidden_states", "attention_mask", "rotary_pos_emb", "rotary_pos_cos", "rotary_pos_sin"),
            *("packed_seq_params", "sequence_len_offset"),
        }
        if name != "dense":
            assert layer.mlp.cudagraph_tensor_store.is_empty()  # what a replay stores is the microbatch's own

    @pytest.mark.parametrize("modules", [_ROUTER, _PREPROCESS], ids=["router", "preprocess"])
    def test_two_in_flight(self, modules: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
        """The tensors that a replay leaves on the MoE layer and its dispatcher belong to its microbatch."""
        monkeypatch.setattr(GraphableMegatronModule, "_te_cuda_graph_replay", _captured)
        cell = replace(by_name("alltoall-shared-ep1"), position="none")
        layer = _graphed_layer(cell, modules)
        before = dict(vars(layer.mlp.token_dispatcher))
        inputs = [torch.randn(6, 2, 32) for _ in range(2)]
        plan = LayerPlan.build(layer)
        runs = [SlotRun(plan).steps(x) for x in inputs]
        for _ in plan.nodes:
            outputs = [next(run) for run in runs]
        after = vars(layer.mlp.token_dispatcher)
        assert before.keys() == after.keys()
        assert [name for name in before if before[name] is not after[name]] == []
        plain = make_model(cell).decoder.layers[0]
        for x, output in zip(inputs, outputs, strict=True):
            assert torch.equal(output, plain(hidden_states=x, attention_mask=None)[0])

    def test_the_graphs_weight_gradients(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The hook of the replayed slot runs the graph's own ``backward_dw``, once for each microbatch."""
        monkeypatch.setattr(GraphableMegatronModule, "_te_cuda_graph_replay", _captured)
        layer = _graphed_layer(replace(by_name("alltoall-moe-ep1"), position="none"), _ATTENTION)
        plan = LayerPlan.build(layer)
        for count in (1, 2):
            run = SlotRun(plan)
            run.forward(torch.randn(6, 2, 32, requires_grad=True))
            run.backward(torch.randn(6, 2, 32))
            assert layer.cuda_graphs[0].num_wgrads == count

    def test_graphs_of_the_plain_layer_are_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Megatron-Core's replay runs the experts too where its flag is off, and returns something else."""
        monkeypatch.setattr(GraphableMegatronModule, "_te_cuda_graph_replay", _captured)
        layer = _graphed_layer(replace(by_name("alltoall-moe-ep1"), position="none"), _ATTENTION)
        layer.config.overlap_moe_expert_parallel_comm = False
        with pytest.raises(UnsupportedLayerError, match="or capture none") as caught:
            SlotRun(LayerPlan.build(layer)).forward(torch.randn(6, 2, 32))
        assert caught.value.field == "overlap_moe_expert_parallel_comm"
        assert layer.replays == []

    def test_without_graphs_nothing_is_replayed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A layer whose list of graphs is empty (warm-up) runs eagerly."""
        monkeypatch.setattr(TransformerLayer, "_te_cuda_graph_replay", _refuse)
        layer = _graphed_layer(replace(by_name("alltoall-moe-ep1"), position="none"), _ATTENTION)
        layer.cuda_graphs = []
        SlotRun(LayerPlan.build(layer)).forward(torch.randn(6, 2, 32))


def _refuse(*_: Any, **__: Any) -> None:
    raise AssertionError("replayed")


class _Offload:
    """``FineGrainedActivationOffloadingInterface`` that notes its calls."""

    events: list[tuple[str, ...]]

    def __init__(self, offload: bool, tensor: Tensor, name: str) -> None:
        self.offload, self.tensor, self.name = offload, tensor, name

    def __enter__(self) -> Tensor:
        self.events.append(("enter", self.name, str(self.offload)))
        return self.tensor

    def __exit__(self, *_: Any) -> None:
        self.events.append(("exit", self.name))

    def group_offload(self, tensor: Tensor, forced_released_tensors: list[Tensor] | None = None) -> Tensor:
        self.events.append(("offload", self.name, str(len(forced_released_tensors or ()))))
        return tensor


@pytest.mark.parametrize("name", ["alltoall-moe-ep1", "dense", "recompute-all-ep1"])
def test_activation_offload_manager(name: str) -> None:
    """The norms run inside the manager, and its group is offloaded after the residual was added, as in the plain layer;
    with two microbatches in flight each has its own."""
    layer = make_model(replace(by_name(name), position="none")).decoder.layers[0]
    layer.offload_attn_norm = layer.offload_mlp_norm = True
    layer.off_interface = type("Offload", (_Offload,), {"events": []})
    events = layer.off_interface.events
    x = torch.randn(6, 2, 32)
    expected, _ = layer(hidden_states=x, attention_mask=None)
    plain = list(events)
    assert ("offload", "mlp_norm", "1") in plain
    events.clear()
    plan = LayerPlan.build(layer)
    assert torch.equal(SlotRun(plan).forward(x), expected)
    assert events == plain
    events.clear()
    runs = [SlotRun(plan).steps(x) for _ in range(2)]
    for _ in plan.nodes:
        outputs = [next(run) for run in runs]
    assert all(torch.equal(output, expected) for output in outputs)
    assert sorted(events) == sorted(plain * 2)
    assert layer.__dict__.get("mlp_norm_manager") is None


class _FusedResidualNorm(nn.Module):
    """A norm that returns ``(out, residual)``, as Transformer Engine's fused one does; the residual is visibly its
    own."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        return self.norm(hidden.to(self.norm.weight.dtype)), hidden * self.scale.to(hidden.dtype)


_FUSED_NORMS = ("alltoall-moe-ep1", "alltoall-shared-ep1", "dense", "mlp-chunks-ep1", "bf16-ep1")


class TestFusedResidualNorms:
    """A norm that returns the residual too: the layer adds that one, not its own input."""

    @staticmethod
    def _layer(name: str) -> Any:
        cell = replace(by_name(name), position="none")
        if name == "bf16-ep1":
            cell = cell.with_config(fp32_residual_connection=True)
        layer = make_model(cell).decoder.layers[-1]
        for norm in ("input_layernorm", "pre_mlp_layernorm"):
            setattr(layer, norm, _FusedResidualNorm(getattr(layer, norm)))
        return layer

    @pytest.mark.parametrize("name", _FUSED_NORMS)
    def test_equals_the_plain_layer(self, name: str) -> None:
        """Outputs and gradients of two microbatches in flight, the norms' own included."""
        plain, layer = self._layer(name), self._layer(name)
        dtype = next(plain.parameters()).dtype
        inputs = [torch.randn(6, 2, 32, dtype=dtype) for _ in range(2)]
        grads = [torch.randn(6, 2, 32) for _ in range(2)]
        expected = []
        for x, grad in zip(inputs, grads, strict=True):
            leaf = x.clone().requires_grad_()
            output, _ = plain(hidden_states=leaf, attention_mask=None)
            output.backward(grad.to(output.dtype))
            expected.append((output, leaf.grad))
        plan = LayerPlan.build(layer)
        runs = [SlotRun(plan) for _ in inputs]
        steps = [run.steps(x.clone().requires_grad_()) for run, x in zip(runs, inputs, strict=True)]
        for _ in plan.nodes:
            outputs = [next(step) for step in steps]
        for run, output, grad, (want, want_grad) in zip(runs, outputs, grads, expected, strict=True):
            assert torch.equal(output, want)
            assert torch.equal(run.backward(grad.to(output.dtype)), want_grad)
        found = gradients(layer)
        assert found["pre_mlp_layernorm.scale"] is not None
        assert_equal_gradients(gradients(plain), found)


class _Buffer(SimpleNamespace):
    """Transformer Engine's ``EpBuffer``: what dispatch leaves for combine."""


def _ep_dispatch(
    buffer: _Buffer, x: Tensor, indices: Tensor, weights: Tensor, recv_tokens: Any = None, recv_topk_weights: Any = None
) -> tuple[Tensor, Tensor, Tensor]:
    """One rank's exchange: rows sorted by expert, padded to the receive capacity."""
    experts, order = indices.flatten().sort(stable=True)
    rows = order // indices.size(1)
    buffer.rows = rows
    pad = buffer.recv_capacity_per_rank - len(rows)
    tokens = torch.nn.functional.pad(x[rows], (0, 0, 0, pad))
    probs = torch.nn.functional.pad(weights.flatten()[order], (0, pad))
    return tokens, torch.bincount(experts, minlength=buffer.num_local_experts), probs


def _ep_combine(buffer: _Buffer, x: Tensor, *, num_local_tokens: int, grad_out: Any) -> Tensor:
    out = x.new_zeros(num_local_tokens, x.size(1))
    return out.index_add(0, buffer.rows, x[: len(buffer.rows)])


@contextmanager
def _nccl_ep() -> Iterator[mock.Mock]:
    """Stand-ins for Transformer Engine's NCCL EP in the real ``_NCCLEPManager``."""
    bootstrap = mock.Mock()
    stand_ins = {
        "ensure_nccl_ep_bootstrapped": bootstrap,
        "new_nccl_ep_buffer": _Buffer,
        "nccl_ep_dispatch": _ep_dispatch,
        "nccl_ep_combine": _ep_combine,
        "alloc_ep_symm_buffer": lambda shape, dtype, group: torch.zeros(shape, dtype=dtype),
    }
    with ExitStack() as stack:
        for name, stand_in in stand_ins.items():
            stack.enter_context(mock.patch.object(token_dispatcher, name, stand_in))
        yield bootstrap


_FLEX = {"moe_token_dispatcher_type": "flex", "moe_flex_dispatcher_backend": "hybridep", "moe_router_dtype": "fp32"}


def _nccl_ep_model(cell: Cell) -> Any:
    """A model whose flex dispatchers have the NCCL EP manager; Megatron builds one for more than one rank only."""
    model = make_model(cell.with_config(**_FLEX))
    for dispatcher in (m.token_dispatcher for m in model.modules() if isinstance(m, MoELayer)):
        config = dispatcher.config
        config.moe_flex_dispatcher_backend = "ncclep"
        config.moe_expert_rank_capacity_factor = 4.0
        dispatcher._comm_manager = token_dispatcher._NCCLEPManager(
            dispatcher.tp_ep_group, dispatcher.num_local_experts, config.moe_router_topk, config.num_moe_experts, config
        )
    return model


class TestNcclEp:
    """The real manager of the ``ncclep`` backend, over stand-ins for Transformer Engine's exchange."""

    @pytest.mark.parametrize("name", ["alltoall-moe-ep1", "alltoall-paired-ep1", "alltoall-shared-ep1", "mtp-two-ep1"])
    def test_equals_the_plain_model(self, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """Outputs and gradients, one after the other and with two microbatches in flight."""
        monkeypatch.setattr("tests.support.compare.make_model", _nccl_ep_model)
        with _nccl_ep():
            verdict = run_cell(by_name(name), layernodes.install)
        assert verdict.status == "right", verdict

    def test_the_bootstrap_lasts(self) -> None:
        """What the first dispatch sets up once stays on the shared manager; a microbatch's buffer does not."""
        cell = by_name("alltoall-moe-ep1")
        with _nccl_ep() as bootstrap, layernodes.install():
            model = _nccl_ep_model(cell)
            for microbatch in make_microbatches(cell):
                plan = model.build_schedule_plan(**microbatch.inputs)
                output = type(plan).run(plan, None)
                type(plan).run(None, plan, b_grad=torch.ones_like(output))
        assert bootstrap.call_count == len(model.decoder.layers)
        for layer in model.decoder.layers:
            manager = layer.mlp.token_dispatcher._comm_manager
            assert manager._bootstrapped
            assert manager._recv_capacity == 64 * 2 * 4
            assert manager._buffer is None
            assert manager.token_probs is None

    def test_zero_copy(self) -> None:
        """With zero copy, dispatch's backward is given the symmetric buffer, by ``StageDispatchBwdGrad``."""
        with _nccl_ep():
            layer = _nccl_ep_model(replace(by_name("alltoall-moe-ep1"), position="none")).decoder.layers[0]
            layer.config.moe_ncclep_zero_copy = layer.config.overlap_moe_expert_parallel_comm = True
            manager = layer.mlp.token_dispatcher._comm_manager
            buffer = torch.zeros(64 * 2 * 4, 32)
            with mock.patch.object(type(manager), "_zc_bwd_token_buf", buffer):
                run = SlotRun(LayerPlan.build(layer))
                output = run.forward(torch.randn(6, 2, 32, requires_grad=True))
                run.backward(torch.randn_like(output))
        assert buffer.abs().sum() > 0
