"""What a training configuration must be for Megatron-Core's loop to run under ``schedule()``: everything that is not
so, at once.

Megatron-Core checks ``overlap_moe_expert_parallel_comm`` and ``delay_wgrad_compute`` when a configuration is made
(``TransformerConfig.__post_init__``), stopping at the first thing that it finds. Here the flags are set on existing
configurations, so these checks are ours. Of Megatron-Core's own:

    kept      pipelining needs virtual stages; an expert-parallel loop of its own (``hybrid_context_parallel``), CUDA
              graphs of whole MLPs, ncclep with ``expert_fc1`` offloaded, the overlap of dispatch with experts' wgrad,
              FSDP with double buffers, with per-layer graphs, with virtual stages
    lifted    no expert parallelism, ``allgather``, fp32, recompute of ``moe`` and full recompute (not done then: the
              same numbers, no memory saved), overlapped shared experts, several MTP layers, a dense layer inside MTP
    added     two pipeline stages without ``overlap_p2p_comm`` (Megatron-Core's plain loop mixes up messages there),
              partial recompute by microbatch, chunks missing or given twice
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, Final

from megatron.core.distributed.fsdp.src.megatron_fsdp.utils import find_megatron_fsdp
from megatron.core.models.hybrid.hybrid_block import HybridStack
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.transformer.enums import CudaGraphModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import get_attr_wrapped_model, is_te_min_version
from torch.nn import Module

from layernodes._megatron.chunk import ModelChunk
from layernodes._megatron.chunks import unchecked_chunk_of
from layernodes._megatron.layer_kinds import inner_layers, kind_of
from layernodes._megatron.overrides import check_schedule_plan
from layernodes._megatron.wgrad import own_deferred_parameters
from layernodes.errors import ConfigViolation, UnsupportedLayerError

_CHUNKS: Final = "models"
_HELD_BACK: Final = ConfigViolation(
    field="delay_wgrad_compute",
    value=True,
    reason="Transformer Engine's modules hold their weight gradients back, and without W steps nobody asks for them; "
    "use wgrad='auto', or build the model with delay_wgrad_compute=False",
)


def training_violations(
    models: Sequence[Module], *, delay_wgrad: bool, is_known: Callable[[Module], bool] = lambda _: False
) -> tuple[ConfigViolation, ...]:
    """Everything for which the chunks of this rank cannot be trained under a schedule; empty where they can.

    Args:
        models: the chunks, wrapped or not, as given to Megatron-Core's loop.
        delay_wgrad: whether weight gradients are to be deferred.
        is_known: whether the user has nodes for a layer of the user's own class.
    """
    found: dict[tuple[str, str], ConfigViolation] = {}
    for violation in _violations(models, delay_wgrad, is_known):
        found.setdefault((violation.field, str(violation.value)), violation)
    return tuple(found.values())


def raise_violations(violations: Sequence[ConfigViolation]) -> None:
    """Raise one UnsupportedLayerError with all of them; nothing where there are none."""
    if not violations:
        return
    first = violations[0]
    reasons = [f"{v.field} is {v.value!r}: {v.reason}" for v in violations]
    text = reasons[0] if len(reasons) == 1 else "\n  ".join([f"{len(reasons)} reasons:", *reasons])
    raise UnsupportedLayerError(
        f"this model cannot be trained under schedule(): {text}",
        field=first.field,
        value=first.value,
        violations=violations,
    )


def recompute_notes(models: Iterable[Module]) -> list[str]:
    """What is configured to save memory and does not under a schedule; the numbers are the same."""
    kept = "is not done: the slots of a schedule keep their activations"
    notes: list[str] = []
    for config in (getattr(model, "config", None) for model in models):
        if config is not None and config.recompute_granularity == "full":
            notes.append(f"recompute_granularity='full' {kept}")
        elif config is not None and config.recompute_granularity and "moe" in (config.recompute_modules or ()):
            notes.append(f"'moe' in recompute_modules {kept}")
    return [*dict.fromkeys(notes)]


def _violations(
    models: Sequence[Module], delay_wgrad: bool, is_known: Callable[[Module], bool]
) -> Iterator[ConfigViolation]:
    chunks: list[ModelChunk] = []
    for model in models:
        yield from _refusal(lambda given: chunks.append(unchecked_chunk_of(given)), model)
    configs = {id(chunk.model.config): chunk.model.config for chunk in chunks}
    for config in configs.values():
        yield from _of_pipeline(config, len(models))
        yield from _of_loop(config)
        yield from _of_graphs(config, delay_wgrad)
    if len({id(chunk.model) for chunk in chunks}) < len(chunks):
        yield ConfigViolation(field=_CHUNKS, value=len(models), reason="the same chunk is given twice; give each once")
    for model in models:
        yield from _of_fsdp(model, len(models))
    for chunk in chunks:
        yield from _refusal(chunk.check)
        yield from _refusal(check_schedule_plan, chunk.model, chunk.model_class)
        for layer in _single_layers(chunk):
            if not delay_wgrad and own_deferred_parameters(layer.config, [layer]):
                yield _HELD_BACK
            if not is_known(layer):
                yield from _refusal(partial(kind_of, has_nodes=False), layer)


def _single_layers(chunk: ModelChunk) -> Iterator[Any]:
    """The layers of a chunk, and those in the stacks of MTP layers."""
    yield from chunk.decoder_layers
    for layer in chunk.mtp_layers:
        yield layer
        if isinstance(getattr(layer, "mtp_model_layer", None), HybridStack):
            yield from inner_layers(layer)


def _refusal(check: Callable[..., object], *arguments: Any) -> Iterator[ConfigViolation]:
    """What ``check`` raises, if it does."""
    try:
        check(*arguments)
    except UnsupportedLayerError as error:
        yield ConfigViolation(field=error.field, value=error.value, reason=str(error))


def _of_pipeline(config: TransformerConfig, num_models: int) -> Iterator[ConfigViolation]:
    stages, virtual = config.pipeline_model_parallel_size, config.virtual_pipeline_model_parallel_size
    if stages > 1 and virtual is None:
        yield ConfigViolation(
            field="virtual_pipeline_model_parallel_size",
            value=virtual,
            reason="Megatron-Core asks for schedule plans only in its interleaved pipeline, and would run the plain "
            "model; give each of the pipeline's stages several chunks",
        )
    if stages > 1 and virtual is not None and num_models != virtual:
        yield ConfigViolation(
            field=_CHUNKS,
            value=num_models,
            reason=f"this rank has {virtual} chunks, virtual_pipeline_model_parallel_size; give all of them",
        )
    if stages == 1 and num_models != 1:
        yield ConfigViolation(
            field=_CHUNKS, value=num_models, reason="without a pipeline Megatron-Core trains one chunk; give that one"
        )
    if stages == 2 and virtual is not None and not config.overlap_p2p_comm:
        yield ConfigViolation(
            field="overlap_p2p_comm",
            value=config.overlap_p2p_comm,
            reason="with two interleaved stages both neighbours are one rank, and Megatron-Core's loop, the plain one "
            "too, takes gradients for activations; set overlap_p2p_comm=True and batch_p2p_comm=False",
        )
    if stages > 1 and config.overlap_p2p_comm and config.batch_p2p_comm:
        yield ConfigViolation(
            field="batch_p2p_comm",
            value=config.batch_p2p_comm,
            reason="excludes overlap_p2p_comm in Megatron-Core's interleaved pipeline; set it to False",
        )


def _of_loop(config: TransformerConfig) -> Iterator[ConfigViolation]:
    if getattr(config, "hybrid_context_parallel", False):
        yield ConfigViolation(
            field="hybrid_context_parallel",
            value=True,
            reason="has a training loop of its own, which never asks for schedule plans; set it to False",
        )
    if config.num_microbatches_with_partial_activation_checkpoints is not None:
        yield ConfigViolation(
            field="num_microbatches_with_partial_activation_checkpoints",
            value=config.num_microbatches_with_partial_activation_checkpoints,
            reason="Megatron-Core's combined step drops it; set it to None",
        )
    if config.overlap_dispatch_backward_with_experts_wgrad:
        yield ConfigViolation(
            field="overlap_dispatch_backward_with_experts_wgrad",
            value=True,
            reason="defers the experts' weight gradients by itself; set it to False and choose a schedule with "
            "wgrad='auto' instead",
        )
    if (
        config.moe_token_dispatcher_type == "flex"
        and config.moe_flex_dispatcher_backend == "ncclep"
        and config.fine_grained_activation_offloading
        and "expert_fc1" in (config.offload_modules or [])
    ):
        yield ConfigViolation(
            field="offload_modules",
            value=list(config.offload_modules or []),
            reason="offloading 'expert_fc1' keeps the experts' input, which ncclep's dispatch writes over; drop it",
        )


def _of_graphs(config: TransformerConfig, delay_wgrad: bool) -> Iterator[ConfigViolation]:
    if config.cuda_graph_impl != "transformer_engine":
        return
    whole = [module for module in (CudaGraphModule.moe, CudaGraphModule.mlp) if module in config.cuda_graph_modules]
    if whole:
        yield ConfigViolation(
            field="cuda_graph_modules",
            value=[module.name for module in config.cuda_graph_modules],
            reason=f"a graph over {' and '.join(module.name for module in whole)} spans several slots; leave it out",
        )
    if delay_wgrad and not is_te_min_version("2.10.0"):
        yield ConfigViolation(
            field="cuda_graph_impl",
            value=config.cuda_graph_impl,
            reason="deferred weight gradients in partial CUDA graphs need Transformer Engine 2.10; use wgrad='off'",
        )


def _unwrapped(model: Any) -> Any:
    return get_attr_wrapped_model(model, "config", return_model_obj=True)


def _of_fsdp(model: Module, num_models: int) -> Iterator[ConfigViolation]:
    fsdp = find_megatron_fsdp(model)
    if fsdp is None:
        return
    ddp_config, config = fsdp.ddp_config, _unwrapped(model).config
    if isinstance(_unwrapped(model), HybridModel):
        yield ConfigViolation(
            field="use_megatron_fsdp",
            value=True,
            reason="the layers of a HybridModel are not gathered and released one by one under a schedule; use "
            "DistributedDataParallel",
        )
    if num_models > 1:
        yield ConfigViolation(
            field="virtual_pipeline_model_parallel_size",
            value=num_models,
            reason="Megatron-Core's interleaved pipeline refuses FSDP with schedule plans; use one pipeline stage",
        )
    if ddp_config.fsdp_double_buffer:
        yield ConfigViolation(
            field="fsdp_double_buffer",
            value=True,
            reason="two microbatches use a layer's parameters at once; set it to False",
        )
    if config.cuda_graph_impl not in ("none", "full_iteration"):
        yield ConfigViolation(
            field="cuda_graph_impl",
            value=config.cuda_graph_impl,
            reason="graphs of single layers do not follow FSDP's gather and release; use 'full_iteration' or 'none'",
        )
    if ddp_config.data_parallel_sharding_strategy == "optim_grads_params" and not (
        fsdp.enable_fine_grained_param_gather_hook
    ):
        yield ConfigViolation(
            field="megatron_fsdp_enable_fine_grained_param_gather",
            value=False,
            reason="slots call a layer's parts one by one, so each must gather its parameters; set it in the "
            "DistributedDataParallelConfig before wrapping the model",
        )
