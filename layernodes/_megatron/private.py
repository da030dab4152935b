"""Private views of shared modules: what a forward writes on them stays with one microbatch.

Megatron-Core keeps per-microbatch state on the layer (norm checkpoints), the MoE layer, the token dispatcher and its
communication manager, MLA attention, the grouped experts and the overlapped shared experts, so two microbatches in
flight on one layer overwrite each other there. A view has the same class, parameters, buffers, submodules and hooks as
the object it stands for, and attributes of its own. No backward reads any of that state, so a view for the forward is
enough.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.tensor_parallel.random import CheckpointWithoutOutput
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.token_dispatcher import MoEAllGatherTokenDispatcher, MoETokenDispatcher
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor

from layernodes.lane import tensors_in

# Set up once by the first forward and meant to stay (NCCL EP bootstrap): written back to the shared object.
_LASTING = ("_bootstrapped", "_max_tokens_per_rank", "_recv_capacity")


def view_of[T](shared: T, **submodules: Any) -> T:
    """A view of ``shared`` whose attributes are its own; ``submodules`` replace those of the same name."""
    view = object.__new__(type(shared))
    view.__dict__.update(shared.__dict__)
    if submodules:
        view.__dict__["_modules"] = {**shared.__dict__["_modules"], **submodules}
    return view


class PrivateAllGatherDispatcher(MoEAllGatherTokenDispatcher):  # type: ignore[misc]  # Megatron-Core has no type information
    """An all-gather dispatcher that gathers tokens into a tensor of their own.

    Megatron-Core's gathers them into a buffer of the whole process, and their gradients too, where another microbatch,
    or a sequence-parallel linear on the other stream, would overwrite them.
    """

    def token_dispatch(self, hidden_states: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """As the base class's, without its buffer."""
        if self.tp_size > 1 or self.ep_size > 1:
            with torch.no_grad():
                self.routing_map: Tensor = gather_from_sequence_parallel_region(
                    self.routing_map, group=self.tp_ep_group
                )
            probs = gather_from_sequence_parallel_region(probs, group=self.tp_ep_group)
            hidden_states = gather_from_sequence_parallel_region(hidden_states, group=self.tp_ep_group)
        return hidden_states, probs


def private_layer(layer: TransformerLayer) -> TransformerLayer:
    """A view of a transformer layer for one microbatch; its MoE layer, if any, is replaced by ``private_moe``."""
    attention = layer.self_attention
    if "qkv_up_checkpoint" in attention.__dict__:
        return view_of(layer, self_attention=view_of(attention))
    return view_of(layer)


def private_moe(moe: MoELayer) -> MoELayer:
    """A view of a MoE layer for one microbatch, with a private dispatcher and whatever else a forward writes on."""
    submodules: dict[str, Any] = {}
    if getattr(moe.experts, "activation_recompute", False):
        submodules["experts"] = view_of(moe.experts)
    shared_experts = moe.shared_experts
    if shared_experts is not None and moe.shared_expert_overlap:
        shared_experts = submodules["shared_experts"] = view_of(shared_experts)
    view = view_of(moe, **submodules)
    training = moe.__dict__.get("_training_token_dispatcher", moe.token_dispatcher)
    view.__dict__["token_dispatcher"] = private_dispatcher(training, shared_experts)
    if moe.config.cuda_graph_impl == "transformer_engine":
        view.cudagraph_tensor_store = type(moe.cudagraph_tensor_store)()
    return view


def private_dispatcher(dispatcher: MoETokenDispatcher, shared_experts: Any) -> MoETokenDispatcher:
    """A view of a token dispatcher, with a view of its communication manager where it has one."""
    view = view_of(dispatcher)
    if type(view) is MoEAllGatherTokenDispatcher:
        view.__class__ = PrivateAllGatherDispatcher
    if dispatcher.shared_experts is not None:
        view.shared_experts = shared_experts
    manager = dispatcher.__dict__.get("_comm_manager")
    if manager is not None:
        view._comm_manager = view_of(manager)
    return view


def seal(moe: MoELayer, shared: MoELayer) -> None:
    """Cut the tensors that a slot left on the private dispatcher from that slot's graph, before another slot reads
    them.

    The dispatcher keeps, for their dtype or until they are replaced, tensors that require grad (``probs``,
    ``local_probs``, ``token_probs``, ...); they would carry one slot's graph into another.
    """
    dispatcher = moe.token_dispatcher
    _detach_attributes(dispatcher)
    manager = dispatcher.__dict__.get("_comm_manager")
    if manager is not None:
        _detach_attributes(manager)
        lasting = shared.token_dispatcher._comm_manager
        for name in _LASTING:
            if name in manager.__dict__:
                setattr(lasting, name, getattr(manager, name))


def adopt(moe: MoELayer, stream: torch.Stream | None) -> None:
    """Tell the allocator that ``stream`` now uses the tensors on the private dispatcher; None on a CPU."""
    if stream is None:
        return
    dispatcher = moe.token_dispatcher
    for holder in (dispatcher, dispatcher.__dict__.get("_comm_manager")):
        if holder is not None:
            for value in holder.__dict__.values():
                if isinstance(value, Tensor) and value.is_cuda:
                    value.record_stream(stream)


def private_tensors(view: Any) -> Iterator[Tensor]:
    """The tensors that forwards of one microbatch have left on a view and on the views that hang on it."""
    attributes = view.__dict__
    for value in attributes.values():
        if isinstance(value, Tensor | tuple | list):
            yield from tensors_in(value)
        elif isinstance(value, CheckpointWithoutOutput):
            context = value.ctx
            if context is not None:
                yield from (t for t in context.saved_tensors if isinstance(t, Tensor))
            yield from (t for t in value.outputs or () if isinstance(t, Tensor))
        elif isinstance(value, MoETokenDispatcher):
            yield from private_tensors(value)
    manager = attributes.get("_comm_manager")
    if manager is not None:
        yield from private_tensors(manager)


def _detach_attributes(holder: Any) -> None:
    attributes = holder.__dict__
    for name, value in attributes.items():
        kind: type = type(value)
        if _is_tensor(kind) and value.requires_grad:
            attributes[name] = value.detach()


@functools.cache
def _is_tensor(kind: type) -> bool:
    """``isinstance(value, Tensor)`` by the value's class: torch's own answer to it is slow for what is none."""
    return issubclass(kind, Tensor)
