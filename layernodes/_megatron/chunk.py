"""A Megatron-Core ``GPTModel`` chunk: its layers, its ends, and the state of one microbatch.

Mirrors ``GPTModel.forward`` and ``TransformerModelChunkSchedulePlan`` of megatron-core 0.19.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final, final

from megatron.core.enums import Fp8Recipe
from megatron.core.fp8_utils import get_fp8_context
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.module import Float16Module, float16_to_fp32
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import Module

from layernodes._megatron.chunk_ends import post_process, pre_process
from layernodes._megatron.shared_parameters import SharedParameters
from layernodes._megatron.support import check_block_kwargs, check_decoder, check_padding_mask, check_recomputed_norms
from layernodes.errors import BatchError, UnsupportedLayerError
from layernodes.wgrad import Site

_ARGUMENTS: Final = tuple(name for name in inspect.signature(GPTModel.forward).parameters if name != "self")
_IGNORED: Final = ("inference_context", "inference_params")


class ChunkState:
    """The state of one chunk and microbatch, with the attributes of Megatron-Core's ``ModelChunkState``."""


@final
class GPTChunk:
    """One part (pipeline, virtual pipeline, or whole) of a GPT model, without its layers' nodes.

    Args:
        model: a ``GPTModel``, possibly wrapped in ``Float16Module`` or DistributedDataParallel.

    Raises:
        UnsupportedLayerError: it is, or wraps, something else.
    """

    def __init__(self, model: Module) -> None:
        self.model, self._is_float16 = _unwrap(model)
        check_decoder(self.model.decoder)
        self.decoder_layers: tuple[Module, ...] = tuple(self.model.decoder.layers)
        mtp = getattr(self.model, "mtp", None)
        self.mtp_layers: tuple[Module, ...] = ()
        if mtp is not None:
            self.mtp_layers = tuple(mtp.layers)
            if mtp.mtp_use_repeated_layer:
                self.mtp_layers = self.mtp_layers[:1] * int(mtp.config.mtp_num_layers)
        self.has_post_process = bool(self.model.post_process)
        self._shared = SharedParameters.of(self.model)

    def new_state(self, batch: Mapping[str, Any]) -> Any:
        """The state of a microbatch whose arguments to ``model.forward`` are ``batch``.

        Raises:
            UnsupportedLayerError: an argument that the split path does not pass on.
            BatchError: an argument that ``model.forward`` does not have, or lacks.
        """
        state: Any = ChunkState()
        arguments = dict(batch)
        state.hidden_states = arguments.pop("hidden_states", None)
        unknown = sorted(arguments.keys() - set(_ARGUMENTS))
        if unknown:
            raise BatchError(
                f"batch has {', '.join(unknown)}, which GPTModel.forward does not take; it takes "
                f"{', '.join(_ARGUMENTS)}, and a chunk without pre-process also hidden_states"
            )
        for name in _IGNORED:
            if arguments.pop(name, None) is not None:
                raise UnsupportedLayerError(
                    f"batch has {name}; schedules are for training, leave it out", field=name, value=batch[name]
                )
        check_block_kwargs(arguments.get("extra_block_kwargs"))
        check_padding_mask(arguments.get("padding_mask"), (*self.decoder_layers, *self.mtp_layers))
        check_recomputed_norms(
            self.model, arguments.get("decoder_input") if self.model.pre_process else state.hidden_states
        )
        for name in _ARGUMENTS:
            if name not in _IGNORED:
                setattr(state, name, arguments.get(name))
        state.model = self.model
        state.context = state.context_mask = state.attention_bias = None
        return state

    def begin_microbatch(self) -> None:
        """What ``GPTModel.forward`` does before its first computation."""
        if self.model.config.fine_grained_activation_offloading:
            self.model.preprocess_for_fine_grained_offloading()
        if self.model.config.moe_paged_stash:
            self.model.preprocess_for_paged_stash()

    def run_context(self) -> AbstractContextManager[Any]:
        """The context around a whole run: that of delayed scaling, whose scales are updated when it is left."""
        config = self.model.config
        if config.fp8 and config.fp8_recipe == Fp8Recipe.delayed:
            context: AbstractContextManager[Any] = get_fp8_context(config)
            return context
        return nullcontext()

    def pre_process(self, state: Any, hidden: Tensor | None) -> Tensor:
        """The chunk's head; ``hidden`` as in ``pre_process``."""
        return pre_process(self.model, state, hidden)

    def post_process(self, state: Any, hidden: Tensor) -> Tensor:
        """The chunk's tail, in fp32 where ``Float16Module`` would have it so."""
        output = post_process(self.model, state, hidden)
        return float16_to_fp32(output) if self._is_float16 else output

    def sites(self, place: str) -> tuple[Site, ...]:
        """Where ``pre_process``, ``post_process`` or the first slot of an MTP layer uses parameters of the model's ends
        that other nodes use too."""
        if place == "pre_process":
            return self._shared.pre_process
        return self._shared.post_process if place == "post_process" else self._shared.mtp_first

    @property
    def is_tensor_parallel(self) -> bool:
        """Whether embedding and output layer are shared with other ranks."""
        return int(self.model.config.tensor_model_parallel_size) > 1


def exchange_groups(layers: Iterable[Module]) -> tuple[ProcessGroup, ...]:
    """The groups over which the Megatron-Core MoE layers among ``layers`` exchange tokens, each once."""
    groups: dict[int, ProcessGroup] = {}
    for layer in layers:
        moe = getattr(getattr(layer, "mtp_model_layer", layer), "mlp", None)
        group = getattr(getattr(moe, "token_dispatcher", None), "tp_ep_group", None)
        if isinstance(group, ProcessGroup) and group.size() > 1:
            groups[id(group)] = group
    return tuple(groups.values())


def _unwrap(model: Module) -> tuple[Any, bool]:
    """The ``GPTModel``, and whether a ``Float16Module`` is among its wrappers.

    That one converts positional arguments alone, and a batch has none; of its outputs it returns fp32.
    """
    is_float16 = False
    inner: Any = model
    while not isinstance(inner, GPTModel):
        is_float16 = is_float16 or isinstance(inner, Float16Module)
        inner = getattr(inner, "module", None)
        if not isinstance(inner, Module):
            raise UnsupportedLayerError(
                f"{type(model).__name__} is no GPTModel and wraps none; pass a GPTModel chunk, or build the "
                f"plans of your "
                f"own layers with LayerPlan.build and join them with ChunkPlan.of",
                field="model",
                value=type(model),
            )
    return inner, is_float16
