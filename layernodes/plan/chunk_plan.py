"""A model chunk as nodes: pre-process, layer plans (decoder, then MTP), post-process. Built once, reused by all
microbatches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import pairwise
from typing import Any, final

from torch.distributed import ProcessGroup
from torch.nn import Module

from layernodes._megatron.chunk import ModelChunk, exchange_groups
from layernodes._megatron.chunks import chunk_of
from layernodes.errors import PlanError
from layernodes.nodes import ScheduleNode
from layernodes.plan.arguments import check_argument
from layernodes.plan.chunk_places import ChunkPlace, chunk_places
from layernodes.plan.chunk_run import ChunkRun
from layernodes.plan.grouping import Group, group_sizes
from layernodes.plan.layer_plan import LayerPlan, WgradMode
from layernodes.plan.registry import LayerRegistry, NodeFactory, SlotKey, registry_of
from layernodes.plan.shape import ChunkShape, LayerShape, SlotShape
from layernodes.plan.slot_nodes import names_of
from layernodes.slots import ExtraSlot, Slot, StreamType


@final
class ChunkPlan:
    """The nodes of one model chunk. Build with ``ChunkPlan.build`` or ``ChunkPlan.of``; attributes are read-only.

    Attributes:
        shape: what schedules for the chunk are checked against.
        layers: the layer plans, decoder first, then MTP; a repeated MTP layer stands once for each repetition.
        exchange_groups: the process groups over which its Megatron-Core layers exchange tokens.
        places: every slot in forward order, ends and pass-throughs included.
    """

    __slots__ = ("_chunk", "exchange_groups", "layers", "places", "shape")

    _chunk: ModelChunk | None
    exchange_groups: tuple[ProcessGroup, ...]
    shape: ChunkShape
    layers: tuple[LayerPlan, ...]
    places: tuple[ChunkPlace, ...]

    def __init__(
        self,
        layers: Sequence[LayerPlan],
        chunk: ModelChunk | None,
        num_decoder: int,
        kinds: Sequence[str] | None = None,
    ) -> None:
        shape = ChunkShape(
            layers=tuple(
                _layer_shape(plan, None if kinds is None else kinds[i], is_mtp=i >= num_decoder)
                for i, plan in enumerate(layers)
            ),
            pre_process=chunk is not None,
            post_process=chunk is not None and chunk.has_post_process,
        )
        set_once = super().__setattr__
        set_once("_chunk", chunk)
        set_once("exchange_groups", exchange_groups(plan.layer for plan in layers))
        set_once("layers", tuple(layers))
        set_once("shape", shape)
        set_once("places", tuple(chunk_places(layers, shape, num_decoder, chunk)))

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"ChunkPlan is immutable; build another plan instead of setting {name!r}")

    @staticmethod
    def build(
        model: Module,
        *,
        nodes: Mapping[SlotKey, NodeFactory] | None = None,
        split_combine: bool = False,
        wgrad: WgradMode | str = WgradMode.OFF,
        registry: LayerRegistry | None = None,
        group: Group = None,
    ) -> ChunkPlan:
        """Build the plan of any part of a ``GPTModel`` or ``HybridModel``: whole, a pipeline or virtual-pipeline part,
        an empty one.

        Args:
            model: the model chunk, possibly wrapped in Megatron-Core's ``Float16Module`` or
                ``DistributedDataParallel``.
            nodes: node class or factory by slot, for every layer that has the slot.
            split_combine: put everything after the combine exchange into a slot of its own on the compute stream.
            wgrad: ``"auto"`` defers weight gradients wherever a node can; schedules then need their ``W`` steps.
            registry: nodes of layer classes of your own, in a ``HybridModel``.
            group: which neighbouring layers of a ``HybridModel`` are one logical layer of the plan. True, and by
                default: attention and state-space layers with the MoE or MLP layer that follows. False: none. Text: the
                chunk's layer pattern with a blank between logical layers, as in ``"M- M*E"``.

        Raises:
            UnsupportedLayerError: a model, layer or configuration that is not handled.
            PlanError: ``nodes`` or ``group`` does not fit; a slot that no layer has.
        """
        if nodes is not None:
            check_argument("nodes", nodes, Mapping)
        registry = registry_of(registry)
        chunk = chunk_of(model)
        built: dict[Module, LayerPlan] = {}
        given = dict(nodes or {})
        used: set[SlotKey] = set()
        for layer in (*chunk.decoder_layers, *chunk.mtp_layers):
            if layer not in built:
                fitting = {
                    slot: node
                    for slot, node in given.items()
                    if LayerPlan.has_slot(layer, slot, split_combine, registry)
                }
                used |= fitting.keys()
                built[layer] = LayerPlan.build(
                    layer, nodes=fitting, split_combine=split_combine, wgrad=wgrad, registry=registry
                )
        for slot in given:
            if not isinstance(slot, Slot | ExtraSlot):
                raise PlanError(f"nodes has the key {slot!r}; use a Slot, one of {names_of(Slot)}, or an ExtraSlot")
        unused = [str(slot) for slot in given if slot not in used]
        if unused and built:
            raise PlanError(f"nodes names {', '.join(unused)}, which no layer of this chunk has; leave it out")
        single = [built[layer] for layer in chunk.decoder_layers]
        sizes = group_sizes(single, chunk.symbols, group)
        bounds = [sum(sizes[:i]) for i in range(len(sizes) + 1)]
        joined = [LayerPlan.join(single[a:b]) for a, b in pairwise(bounds)]
        kinds = None
        if chunk.symbols is not None:
            decoder = ["".join(chunk.symbols[a:b]) for a, b in pairwise(bounds)]
            kinds = [*decoder, *chunk.symbols[len(single) :]]
        return ChunkPlan([*joined, *(built[layer] for layer in chunk.mtp_layers)], chunk, len(joined), kinds)

    @staticmethod
    def of(layers: Sequence[LayerPlan], *, wgrad: WgradMode | str | None = None) -> ChunkPlan:
        """Join layer plans, without ends and without a model; a batch is then the first layer's input.

        The layers run as a ``TransformerBlock`` calls them: each under its own low-precision context (fp8, fp4), and
        with sequence parallelism under the model-parallel RNG fork.

        Args:
            layers: the plans, in order.
            wgrad: build each anew with this; None takes them as they are.

        Raises:
            PlanError: something else than layer plans.
        """
        check_argument("layers", layers, Sequence)
        for plan in layers:
            if not isinstance(plan, LayerPlan):
                raise PlanError(
                    f"ChunkPlan.of joins layer plans, found {type(plan).__name__}; use LayerPlan.build(layer)"
                )
        plans = layers if wgrad is None else [plan.with_wgrad(wgrad) for plan in layers]
        return ChunkPlan(plans, None, len(plans))

    def open(self, batch: Any) -> ChunkRun:
        """Begin one microbatch; a runner takes it from there, in one call or in several.

        Args:
            batch: the keyword arguments of ``model.forward`` (and ``hidden_states`` for a chunk without pre-process);
                one that the model takes None for may be left out. For ``ChunkPlan.of`` the input tensor, or the tensor
                and a dict of attributes for the chunk state.

        Raises:
            BatchError: something else, or without an argument that the model needs.
        """
        return ChunkRun(self, self._chunk, batch)

    @property
    def model(self) -> Module:
        """The ``GPTModel`` or ``HybridModel`` of a chunk built from one, out of its wrappers.

        Raises:
            PlanError: the chunk was joined from layer plans.
        """
        if self._chunk is None:
            raise PlanError("this chunk was joined from layer plans and has no model; use ChunkPlan.build(model)")
        model: Module = self._chunk.model
        return model

    @property
    def modules(self) -> tuple[Module, ...]:
        """The modules that it runs: the model, or the layers that it was joined from."""
        return tuple(plan.layer for plan in self.layers) if self._chunk is None else (self._chunk.model,)

    def run_context(self) -> AbstractContextManager[Any]:
        """The context that a whole run is under."""
        return nullcontext() if self._chunk is None else self._chunk.run_context()

    @property
    def is_tensor_parallel(self) -> bool:
        """Whether the chunk's ends communicate too, with the ranks that share their parameters."""
        return self._chunk is not None and self._chunk.is_tensor_parallel

    def __repr__(self) -> str:
        return f"ChunkPlan({self.shape})"


def _layer_shape(plan: LayerPlan, kind: str | None, *, is_mtp: bool) -> LayerShape:
    absent = [slot for slot in Slot if slot not in plan.nodes and slot is not Slot.POST_COMBINE]
    slots: list[SlotShape] = []
    names = [*plan.nodes]
    for slot in Slot:
        if slot in absent:
            stream = StreamType.COMM if slot in (Slot.MOE_DISPATCH, Slot.MOE_COMBINE) else StreamType.COMPUTE
            slots.append(SlotShape(name=slot.value, stream=stream, passthrough=True))
        elif slot in plan.nodes:
            slots.append(_slot_shape(slot.value, plan.nodes[slot]))
        slots += [
            _slot_shape(key.name, plan.nodes[key])
            for key in names
            if not isinstance(key, Slot) and plan.root_of(key) is slot
        ]
    return LayerShape(kind=kind or ("moe" if plan.is_moe else "dense"), slots=tuple(slots), mtp=is_mtp)


def _slot_shape(name: str, node: ScheduleNode) -> SlotShape:
    return SlotShape(name=name, stream=node.stream, wgrad=bool(node.wgrad_parameters))
