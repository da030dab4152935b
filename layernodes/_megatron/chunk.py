"""A Megatron-Core model chunk: its layers, its ends, and the state of one microbatch; and that of a ``GPTModel``.

Mirrors ``GPTModel.forward`` and ``TransformerModelChunkSchedulePlan`` of megatron-core 0.19.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar, Final, final

from megatron.core.enums import Fp8Recipe
from megatron.core.fp8_utils import get_fp8_context
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.module import float16_to_fp32
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import Module

from layernodes._megatron.chunk_ends import post_process, pre_process
from layernodes._megatron.overrides import check_model
from layernodes._megatron.shared_parameters import SharedParameters
from layernodes._megatron.support import check_block_kwargs, check_padding_mask, check_recomputed_norms
from layernodes.errors import BatchError, UnsupportedLayerError
from layernodes.stand_in import Site

_IGNORED: Final = ("inference_context", "inference_params")


class ChunkState:
    """The state of one chunk and microbatch, with the attributes of Megatron-Core's ``ModelChunkState``."""


class ModelChunk(ABC):
    """One part (pipeline, virtual pipeline, or whole) of a model, without its layers' nodes.

    Args:
        model: the model chunk, out of its wrappers.
        is_float16: whether a ``Float16Module`` is among its wrappers. That one converts positional arguments alone, and
            a batch has none; of its outputs it returns fp32.

    Attributes:
        model: the chunk.
        decoder_layers, mtp_layers: its layers; a repeated MTP layer stands once for each repetition.
        has_post_process: whether it has the model's tail.
    """

    model_class: ClassVar[type[Module]]

    def __init__(self, model: Any, *, is_float16: bool) -> None:
        self.model = model
        self._is_float16 = is_float16
        self.decoder_layers: tuple[Module, ...] = tuple(self.model.decoder.layers)
        mtp = getattr(self.model, "mtp", None)
        self.mtp_layers: tuple[Module, ...] = ()
        if mtp is not None:
            self.mtp_layers = tuple(mtp.layers)
            if mtp.mtp_use_repeated_layer:
                self.mtp_layers = self.mtp_layers[:1] * int(mtp.config.mtp_num_layers)
        self.has_post_process = bool(self.model.post_process)
        self._shared = SharedParameters.of(self.model)
        self._arguments = tuple(
            name for name in inspect.signature(self.model_class.forward).parameters if name != "self"
        )

    def check(self) -> None:
        """Raise UnsupportedLayerError where the model is not handled; its layers are checked when their plans are
        built."""
        check_model(self.model, self.model_class)

    @property
    def symbols(self) -> tuple[str, ...] | None:
        """What the model's own pattern calls each decoder layer, then each MTP layer; None where it has no pattern."""
        return None

    def new_state(self, batch: Mapping[str, Any]) -> Any:
        """The state of a microbatch whose arguments to ``model.forward`` are ``batch``.

        Raises:
            UnsupportedLayerError: an argument that the split path does not pass on.
            BatchError: an argument that ``model.forward`` does not have, or cannot do without.
        """
        state: Any = ChunkState()
        arguments = dict(batch)
        state.hidden_states = arguments.pop("hidden_states", None)
        names = self._arguments
        unknown = sorted(arguments.keys() - set(names))
        if unknown:
            raise BatchError(
                f"batch has {', '.join(unknown)}, which {self.model_class.__name__}.forward does not take; it takes "
                f"{', '.join(names)}, and a chunk without pre-process also hidden_states"
            )
        for name in _IGNORED:
            if arguments.pop(name, None) is not None:
                raise UnsupportedLayerError(
                    f"batch has {name}; schedules are for training, leave it out", field=name, value=batch[name]
                )
        self._check_inputs(arguments)
        check_block_kwargs(arguments.get("extra_block_kwargs"))
        check_padding_mask(arguments.get("padding_mask"), (*self.decoder_layers, *self.mtp_layers))
        check_recomputed_norms(
            self.model, arguments.get("decoder_input") if self.model.pre_process else state.hidden_states
        )
        for name in names:
            if name not in _IGNORED:
                setattr(state, name, arguments.get(name))
        state.model = self.model
        state.context = state.context_mask = state.attention_bias = None
        return state

    def _check_inputs(self, arguments: Mapping[str, Any]) -> None:
        """Refuse what the model's own forward would fail at, somewhere inside of an embedding."""
        model = self.model
        user = "multi-token prediction" if self.mtp_layers else None
        if model.pre_process and arguments.get("decoder_input") is None:
            user = "embedding"
        needed = {}
        if user is not None:
            needed["input_ids"] = user
            if getattr(model.embedding, "add_position_embedding", False):
                needed["position_ids"] = f"{user}, whose positions are learned,"
        if model.position_embedding_type == "mrope" and not model.config.multi_latent_attention:
            needed["position_ids"] = "rotary embedding (mrope)"
        for name, user in needed.items():
            if arguments.get(name) is None:
                raise BatchError(
                    f"the batch has no {name}, which the {user} of this {self.model_class.__name__} needs; add it, as "
                    f"for the plain model, which fails without it"
                )

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

    @abstractmethod
    def pre_process(self, state: Any, hidden: Tensor | None) -> Tensor:
        """The chunk's head; ``hidden`` ``[s, b, h]`` from the previous part, or given in place of an embedding."""

    @abstractmethod
    def _post_process(self, state: Any, hidden: Tensor) -> Tensor:
        """The chunk's tail: logits or losses."""

    @final
    def post_process(self, state: Any, hidden: Tensor) -> Tensor:
        """The chunk's tail, in fp32 where ``Float16Module`` would have it so."""
        output = self._post_process(state, hidden)
        return float16_to_fp32(output) if self._is_float16 else output

    def ends_decoder(self, node: Callable[..., Any]) -> Callable[..., Any]:
        """What runs in place of the last node of the decoder; by default the node, which ends the decoder itself."""
        return node

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


@final
class GPTChunk(ModelChunk):
    """One part of a ``GPTModel``."""

    model_class = GPTModel

    def pre_process(self, state: Any, hidden: Tensor | None) -> Tensor:
        return pre_process(self.model, state, hidden)

    def _post_process(self, state: Any, hidden: Tensor) -> Tensor:
        return post_process(self.model, state, hidden)


def exchange_groups(layers: Iterable[Module]) -> tuple[ProcessGroup, ...]:
    """The groups over which the Megatron-Core MoE layers among ``layers``, or in them, exchange tokens, each once."""
    groups: dict[int, ProcessGroup] = {}
    for layer in layers:
        for module in layer.modules():
            group = getattr(module.__dict__.get("token_dispatcher"), "tp_ep_group", None)
            if isinstance(group, ProcessGroup) and group.size() > 1:
                groups[id(group)] = group
    return tuple(groups.values())
