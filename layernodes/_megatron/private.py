"""Private views of shared modules: what a forward writes on them stays with one microbatch.

Megatron-Core keeps per-microbatch state on the layer (norm checkpoints), the MoE layer, the token dispatcher and its
communication manager, MLA attention, the grouped experts and the overlapped shared experts, so two microbatches in
flight on one layer overwrite each other there. A view has the same class, parameters, buffers, submodules and hooks as
the object it stands for, and attributes of its own. No backward reads any of that state, so a view for the forward is
enough.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.token_dispatcher import MoETokenDispatcher
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor

# Set up once by the first forward and meant to stay (NCCL EP bootstrap): written back to the shared object.
_LASTING = ("_bootstrapped", "_max_tokens_per_rank", "_recv_capacity")


def view_of[T](shared: T, **submodules: Any) -> T:
    """A view of ``shared`` whose attributes are its own; ``submodules`` replace those of the same name."""
    view = object.__new__(type(shared))
    view.__dict__.update(shared.__dict__)
    if submodules:
        view.__dict__["_modules"] = {**shared.__dict__["_modules"], **submodules}
    return view


def private_layer(layer: TransformerLayer) -> TransformerLayer:
    """A view of a transformer layer for one microbatch; its MoE layer, if any, is replaced by ``private_moe``."""
    attention = layer.self_attention
    if getattr(attention, "qkv_up_checkpoint", attention) is not attention:
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
    view.token_dispatcher = private_dispatcher(training, shared_experts)
    if moe.config.cuda_graph_impl == "transformer_engine":
        view.cudagraph_tensor_store = type(moe.cudagraph_tensor_store)()
    return view


def private_dispatcher(dispatcher: MoETokenDispatcher, shared_experts: Any) -> MoETokenDispatcher:
    """A view of a token dispatcher, with a view of its communication manager where it has one."""
    view = view_of(dispatcher)
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


def _detach_attributes(holder: Any) -> None:
    attributes = holder.__dict__
    for name, value in attributes.items():
        if isinstance(value, Tensor) and value.requires_grad:
            attributes[name] = value.detach()
