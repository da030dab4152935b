"""What may stand around a model: wrappers that do their work without their ``forward``, by hooks on parameters, on
the model's own modules or on what it returns."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

from megatron.core.distributed import DistributedDataParallel, FullyShardedDataParallel, TorchFullyShardedDataParallel
from megatron.core.distributed.fsdp.src.megatron_fsdp.utils import find_megatron_fsdp
from megatron.core.transformer.module import Float16Module
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp import FullyShardedDataParallel as WrappingFSDP
from torch.nn import Module

from layernodes._megatron.overrides import check_override
from layernodes.errors import UnsupportedLayerError

_KNOWN: Final = (Float16Module, DistributedDataParallel, FullyShardedDataParallel)
_SHARDED: Final = (FSDPModule, WrappingFSDP, TorchFullyShardedDataParallel)


class Unwrapped(NamedTuple):
    """A model out of its wrappers.

    Attributes:
        model: the model.
        is_float16: whether a ``Float16Module`` was among them.
    """

    model: Any
    is_float16: bool


def unwrap(model: Module, model_classes: tuple[type[Module], ...]) -> Unwrapped:
    """The model of one of ``model_classes`` in ``model``.

    Raises:
        UnsupportedLayerError: there is none, or a wrapper whose ``forward`` would be missed.
    """
    wrappers: list[Module] = []
    inner: Any = model
    while not isinstance(inner, model_classes):
        wrappers.append(inner)
        inner = getattr(inner, "module", None)
        if not isinstance(inner, Module):
            raise UnsupportedLayerError(
                f"{type(model).__name__} is no GPTModel and no HybridModel and wraps none; pass a chunk of one of "
                f"these, or build the plans of your own layers with LayerPlan.build and join them with ChunkPlan.of",
                field="model",
                value=type(model),
            )
    check_unsharded(model)
    for wrapper in wrappers:
        _check_wrapper(wrapper, inner)
    return Unwrapped(inner, any(isinstance(wrapper, Float16Module) for wrapper in wrappers))


def check_unsharded(module: object) -> None:
    """Raise UnsupportedLayerError where torch's FSDP shards ``module`` or one of its submodules."""
    for name, inner in module.named_modules() if isinstance(module, Module) else ():
        if isinstance(inner, _SHARDED):
            raise UnsupportedLayerError(
                f"{name or 'the module'} ({type(inner).__name__}) is sharded by torch's FSDP, which gathers its "
                f"parameters while it runs as one call, and slots run parts of it; use Megatron-Core's "
                f"DistributedDataParallel, with use_distributed_optimizer=True to shard what the optimizer keeps",
                field="fully_shard",
                value=type(inner),
            )


def _check_wrapper(wrapper: Module, model: Module) -> None:
    if isinstance(wrapper, _KNOWN):
        check_override(wrapper, "forward", *_KNOWN, instead=f"put it into a submodule of the {type(model).__name__}")
    elif find_megatron_fsdp(wrapper) is not wrapper:
        raise UnsupportedLayerError(
            f"{type(wrapper).__module__}.{type(wrapper).__name__} wraps the {type(model).__name__}, and slots run "
            f"without the wrapper's forward(): what it does there, such as having gradients reduced, would be lost; "
            f"wrap the model in Megatron-Core's DistributedDataParallel instead (or in its Float16Module)",
            field="model",
            value=type(wrapper),
        )
