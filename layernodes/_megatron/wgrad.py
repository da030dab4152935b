"""Weight-gradient hooks over modules that defer their own (``backward_dw``), as Megatron-Core drains them."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final, final

from megatron.core.transformer.identity_op import IdentityOp
from torch.nn import Module, Parameter

from layernodes._megatron.deferral import deferrable_sites
from layernodes._megatron.layer import LayerParts

_UP_PROJECTIONS: Final = ("linear_q_up_proj", "linear_kv_up_proj", "linear_q_proj")
_LIBRARIES: Final = ("megatron.core.", "torch.", "transformer_engine.")
_TRANSFORMER_ENGINE: Final = ("megatron.core.extensions.transformer_engine", "transformer_engine")


@final
class ModulesHook:
    """Drains the deferred weight gradients of ``modules``, in order. One microbatch's; used once.

    Args:
        modules: objects with ``backward_dw()`` and ``parameters()``.
    """

    def __init__(self, *modules: Any) -> None:
        self._modules = modules

    def backward_dw(self) -> None:
        """Compute and accumulate the weight gradients that the modules parked."""
        for module in self._modules:
            module.backward_dw()

    def parameters(self) -> Iterator[Parameter]:
        """The parameters of the modules."""
        for module in self._modules:
            yield from module.parameters()


def pre_dispatch_hook(parts: LayerParts) -> ModulesHook | None:
    """The hook of attention, shared experts, ``fc1_latent_proj`` and MTP ``eh_proj``.

    Attention and shared experts go through the wrapper that ``init_backward_dw_wrapper`` makes for each microbatch,
    where it can call them: it knows which of them a CUDA graph already covers.
    """
    layer, moe = parts.layer, parts.moe
    attention = [] if isinstance(layer.self_attention, IdentityOp) else [layer.self_attention]
    shared = [moe.shared_experts] if moe is not None and moe.use_shared_expert and not moe.shared_expert_overlap else []
    latent = [moe.fc1_latent_proj] if moe is not None and parts.config.moe_latent_size else []
    # The wrapper runs fc1_latent_proj only while Megatron-Core's own flag is on.
    covered = [*attention, *shared, *(latent if parts.config.overlap_moe_expert_parallel_comm else ())]
    has_graphs = parts.config.cuda_graph_impl == "transformer_engine"
    modules: list[Any] = []
    if attention and (has_graphs or draining(covered) == covered):
        layer.init_backward_dw_wrapper()
        modules.append(layer.backward_dw_wrapper)
    else:
        covered = []
        modules += draining([*attention, *shared])
    modules += draining(module for module in latent if module not in covered)
    if parts.mtp is not None:
        modules += draining([parts.mtp.eh_proj])
    return ModulesHook(*modules) if modules else None


def draining(modules: Iterable[Module]) -> list[Module]:
    """The outermost of ``modules`` and of what is in them whose ``backward_dw`` computes all that is held back there.

    Megatron-Core's calls its linears' by name, and fails where a module without one stands in a linear's place, such as
    an adapter around it. Then the parts of the module are asked.
    """
    found: list[Module] = []
    for module in modules:
        if hasattr(module, "backward_dw") and not any(map(_stops_draining, module.modules())):
            found.append(module)
        else:
            found += draining(module.children())
    return found


def _stops_draining(module: Module) -> bool:
    kind: type = type(module)
    return not (_is_librarys(kind) or hasattr(module, "backward_dw") or next(module.parameters(), None) is None)


@functools.cache
def _is_librarys(kind: type) -> bool:
    return kind.__module__.startswith(_LIBRARIES)


def attention_hook(parts: LayerParts) -> ModulesHook | None:
    """The hook of a layer that is attention alone: its own where it has one, else of what holds gradients back in
    it."""
    modules = draining([parts.layer.self_attention])
    return ModulesHook(*modules) if modules else held_back_hook(parts.layer)


def held_back_hook(layer: Module) -> ModulesHook | None:
    """The hook of the Transformer Engine modules in ``layer`` that hold their weight gradients back; None for none."""
    if not delays_wgrads(layer):
        return None
    modules = [part for part in layer.modules() if hasattr(part, "backward_dw") and _is_transformer_engine(type(part))]
    return ModulesHook(*modules) if modules else None


def mlp_hook(parts: LayerParts) -> ModulesHook | None:
    """The hook of the routed experts, or of the dense MLP."""
    modules = draining([parts.layer.mlp if parts.moe is None else parts.moe.experts])
    return ModulesHook(*modules) if modules else None


def latent_hook(parts: LayerParts) -> ModulesHook | None:
    """The hook of ``fc2_latent_proj``, where there is one."""
    modules = draining([parts.moe.fc2_latent_proj]) if parts.config.moe_latent_size and parts.moe is not None else []
    return ModulesHook(*modules) if modules else None


def deferrable_modules(parts: LayerParts, modules: Sequence[Module]) -> tuple[Parameter, ...]:
    """The weights of the linears under ``modules`` that this slot may defer: not those that a recompute runs again.

    A recompute runs its linears during backward, in a graph of its own, and their weight gradients come with it.
    """
    layer, moe = parts.layer, parts.moe
    excluded: list[Module] = []
    if layer.recompute_mlp:
        excluded.append(layer.mlp)
    if moe is not None and moe.shared_experts_recompute and moe.shared_experts is not None:
        excluded.append(moe.shared_experts)
    attention = layer.self_attention
    if getattr(attention, "recompute_up_proj", False):
        excluded += [child for name, child in attention.named_children() if name in _UP_PROJECTIONS]
    sites = deferrable_sites(modules, frozenset(map(id, excluded)))
    return tuple(site.parameter for site in sites)


def own_deferred_parameters(config: Any, modules: Sequence[Module]) -> tuple[Parameter, ...]:
    """The weights of Transformer Engine modules under ``modules`` that hold their own gradients back until
    ``backward_dw``."""
    if not config.delay_wgrad_compute:
        return ()
    return tuple(
        parameter
        for module in modules
        for part in module.modules()
        if hasattr(part, "backward_dw") and _is_transformer_engine(type(part))
        for name, parameter in part._parameters.items()
        if parameter is not None
        and parameter.requires_grad
        and (name.startswith("weight") or getattr(parameter, "skip_backward_post_hook", False))
    )


def _is_transformer_engine(kind: type) -> bool:
    return any(base.__module__.startswith(_TRANSFORMER_ENGINE) for base in kind.__mro__)


def delays_wgrads(layer: Any) -> bool:
    """Whether the configuration of ``layer`` makes Transformer Engine modules hold their weight gradients back."""
    return bool(layer.config.delay_wgrad_compute)
