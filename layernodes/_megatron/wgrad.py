"""Weight-gradient hooks over modules that defer their own (``backward_dw``), as Megatron-Core drains them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, final

from megatron.core.transformer.identity_op import IdentityOp
from torch.nn import Parameter

from layernodes._megatron.layer import LayerParts


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

    Attention and shared experts go through the wrapper that ``init_backward_dw_wrapper`` makes for each microbatch: it
    knows which of them a CUDA graph already covers.
    """
    modules: list[Any] = []
    layer = parts.layer
    if not isinstance(layer.self_attention, IdentityOp):
        layer.init_backward_dw_wrapper()
        modules.append(layer.backward_dw_wrapper)
    elif parts.moe is not None and parts.moe.use_shared_expert and not parts.moe.shared_expert_overlap:
        modules.append(parts.moe.shared_experts)
    # The wrapper runs fc1_latent_proj only while Megatron-Core's own flag is on.
    if parts.config.moe_latent_size and parts.moe is not None and not parts.config.overlap_moe_expert_parallel_comm:
        modules.append(parts.moe.fc1_latent_proj)
    if parts.mtp is not None:
        modules.append(parts.mtp.eh_proj)
    return ModulesHook(*modules) if modules else None


def mlp_hook(parts: LayerParts) -> ModulesHook | None:
    """The hook of the routed experts, or of the dense MLP."""
    mlp = parts.layer.mlp if parts.moe is None else parts.moe.experts
    return None if isinstance(mlp, IdentityOp) else ModulesHook(mlp)


def latent_hook(parts: LayerParts) -> ModulesHook | None:
    """The hook of ``fc2_latent_proj``, where there is one."""
    return ModulesHook(parts.moe.fc2_latent_proj) if parts.config.moe_latent_size and parts.moe is not None else None
