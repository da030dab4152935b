"""Every rule on training configurations, one by one: what breaks it, and what comes near and does not."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.enums import CudaGraphModule

from layernodes import UnsupportedLayerError
from layernodes._megatron import constraints
from layernodes._megatron.constraints import raise_violations, training_violations
from tests.support.fixtures import MEGATRON_WORLD, megatron_world
from tests.support.training import Case, Trainer

__all__ = ["megatron_world"]

pytestmark = MEGATRON_WORLD


def _model() -> Any:
    return Trainer(Case(name="constraints", ddp=None)).chunks[0]


def _fields(*models: Any, delay_wgrad: bool = True) -> list[str]:
    found = training_violations(models, delay_wgrad=delay_wgrad)
    for violation in found:
        assert len(violation.reason) > 20
        with pytest.raises(UnsupportedLayerError) as caught:
            raise_violations(found)
        assert caught.value.violations == found
        assert violation.field in str(caught.value) and violation.reason in str(caught.value)
    return [violation.field for violation in found]


_NCCLEP = {
    "moe_token_dispatcher_type": "flex",
    "moe_flex_dispatcher_backend": "ncclep",
    "fine_grained_activation_offloading": True,
    "offload_modules": ["core_attn", "expert_fc1"],
}
_STAGES = {"pipeline_model_parallel_size": 4, "virtual_pipeline_model_parallel_size": 1}
_MESSAGES = {"overlap_p2p_comm": True, "batch_p2p_comm": False}
_GRAPHS = "cuda_graph_impl", "transformer_engine"


@pytest.mark.parametrize(
    "changes, fields",
    [
        ({}, []),
        ({"pipeline_model_parallel_size": 4}, ["virtual_pipeline_model_parallel_size"]),
        (_STAGES, []),
        ({**_STAGES, "virtual_pipeline_model_parallel_size": 2}, ["models"]),
        ({**_STAGES, "pipeline_model_parallel_size": 2, "batch_p2p_comm": False}, ["overlap_p2p_comm"]),
        ({**_STAGES, **_MESSAGES, "pipeline_model_parallel_size": 2}, []),
        ({**_STAGES, "overlap_p2p_comm": True, "batch_p2p_comm": True}, ["batch_p2p_comm"]),
        ({**_STAGES, **_MESSAGES}, []),
        ({"overlap_p2p_comm": True, "batch_p2p_comm": True}, []),  # no pipeline, no messages
        ({"hybrid_context_parallel": True}, ["hybrid_context_parallel"]),
        (
            {"num_microbatches_with_partial_activation_checkpoints": 2},
            ["num_microbatches_with_partial_activation_checkpoints"],
        ),
        ({"overlap_dispatch_backward_with_experts_wgrad": True}, ["overlap_dispatch_backward_with_experts_wgrad"]),
        (_NCCLEP, ["offload_modules"]),
        ({**_NCCLEP, "offload_modules": ["core_attn"]}, []),
        ({**_NCCLEP, "offload_modules": None}, []),
        ({**_NCCLEP, "fine_grained_activation_offloading": False}, []),
        ({**_NCCLEP, "moe_flex_dispatcher_backend": "deepep"}, []),
        ({**_NCCLEP, "moe_token_dispatcher_type": "alltoall"}, []),
    ],
    ids=str,
)
def test_configuration(changes: Mapping[str, Any], fields: list[str]) -> None:
    """Fields of the model's configuration: each rule alone."""
    model = _model()
    for name, value in changes.items():
        setattr(model.config, name, value)
    assert _fields(model) == fields


_VERSIONS = [("2.9.0", True, True), ("2.10.0", True, False), ("2.9", False, False)]


@pytest.mark.parametrize("version, wgrad, told", _VERSIONS)
def test_deferral_in_graphs_needs_a_version_of_transformer_engine(
    version: str, wgrad: bool, told: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Partial CUDA graphs with deferred weight gradients: Transformer Engine 2.10."""

    def is_min(wanted: str) -> bool:
        return [*map(int, version.split("."))] >= [*map(int, wanted.split("."))]

    monkeypatch.setattr(constraints, "is_te_min_version", is_min)
    model = _model()
    assert _fields(model, delay_wgrad=wgrad) == []
    model.config.cuda_graph_impl = "transformer_engine"
    model.config.cuda_graph_modules = [CudaGraphModule.attn]
    assert _fields(model, delay_wgrad=wgrad) == ["cuda_graph_impl"] * told


@pytest.mark.parametrize(
    "modules, told",
    [
        ([CudaGraphModule.moe], "a graph over moe spans"),
        ([CudaGraphModule.attn, CudaGraphModule.mlp], "a graph over mlp spans"),
        ([CudaGraphModule.mlp, CudaGraphModule.moe], "a graph over moe and mlp spans"),
        ([CudaGraphModule.attn, CudaGraphModule.moe_router, CudaGraphModule.moe_preprocess], None),
        ([], None),
    ],
    ids=str,
)
def test_graphs_over_several_slots(
    modules: list[CudaGraphModule], told: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CUDA graphs over whole MoE layers or MLPs; not those over parts of a slot, nor with graphs off."""
    monkeypatch.setattr(constraints, "is_te_min_version", lambda _: True)
    model = _model()
    model.config.cuda_graph_modules = modules
    assert _fields(model) == []
    model.config.cuda_graph_impl = "transformer_engine"
    found = training_violations([model], delay_wgrad=True)
    assert _fields(model) == ["cuda_graph_modules"] * (told is not None)
    if told is not None:
        assert told in found[0].reason
        assert found[0].value == [module.name for module in modules]


_FSDP: dict[str, Any] = {
    "fsdp_double_buffer": False,
    "data_parallel_sharding_strategy": "optim_grads_params",
    "gathers_parts": True,
    "cuda_graph_impl": "none",
    "num_chunks": 1,
}


@pytest.mark.parametrize(
    "changes, fields",
    [
        ({}, []),
        ({"fsdp_double_buffer": True}, ["fsdp_double_buffer"]),
        ({"gathers_parts": False}, ["megatron_fsdp_enable_fine_grained_param_gather"]),
        ({"gathers_parts": False, "data_parallel_sharding_strategy": "optim_grads"}, []),
        ({"cuda_graph_impl": "local"}, ["cuda_graph_impl"]),
        ({"cuda_graph_impl": "full_iteration"}, []),
        ({"num_chunks": 2}, ["virtual_pipeline_model_parallel_size"]),
    ],
    ids=str,
)
def test_fsdp(changes: Mapping[str, Any], fields: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Megatron-Core's FSDP, by a stand-in for its wrapper: each rule alone, and none without it."""
    options = _FSDP | changes
    models = [_model() for _ in range(options["num_chunks"])]
    for model in models:
        model.config.cuda_graph_impl = options["cuda_graph_impl"]
        if len(models) > 1:
            model.config.pipeline_model_parallel_size = 4
            model.config.virtual_pipeline_model_parallel_size = len(models)
    assert _fields(*models) == []
    wrapper = SimpleNamespace(
        ddp_config=SimpleNamespace(
            fsdp_double_buffer=options["fsdp_double_buffer"],
            data_parallel_sharding_strategy=options["data_parallel_sharding_strategy"],
        ),
        enable_fine_grained_param_gather_hook=options["gathers_parts"],
    )
    monkeypatch.setattr(constraints, "find_megatron_fsdp", lambda model: wrapper if model in models else None)
    assert _fields(*models) == fields


def _same_twice(model: Any) -> list[Any]:
    model.config.pipeline_model_parallel_size, model.config.virtual_pipeline_model_parallel_size = 4, 2
    return [model, model]


def _two_without_a_pipeline(model: Any) -> list[Any]:
    return [model, _model()]


def _not_a_model(_: Any) -> list[Any]:
    return [torch.nn.Linear(1, 1)]


def _own_forward(model: Any) -> list[Any]:
    model.__class__ = type("Own", (GPTModel,), {"forward": lambda self: None})
    return [model]


def _own_plan(model: Any) -> list[Any]:
    model.__class__ = type("Own", (GPTModel,), {"build_schedule_plan": lambda self: None})
    return [model]


def _own_post_process(model: Any) -> list[Any]:
    model.__class__ = type("Own", (GPTModel,), {"_postprocess": lambda self: None})
    return [model]


def _cross_attention(model: Any) -> list[Any]:
    model.decoder.layers[0].cross_attention = torch.nn.Linear(1, 1)
    return [model]


@pytest.mark.parametrize(
    "given, fields",
    [
        (_same_twice, ["models"]),
        (_two_without_a_pipeline, ["models"]),
        (_not_a_model, ["model"]),
        (_own_forward, ["Own.forward"]),
        (_own_plan, ["Own.build_schedule_plan"]),
        (_own_post_process, []),
        (_cross_attention, ["cross_attention"]),
    ],
)
def test_models(given: Callable[[Any], list[Any]], fields: list[str]) -> None:
    """The chunks themselves: each once, all of them, GPT models whose own methods run, of layers that have slots."""
    assert _fields(*given(_model())) == fields
