"""The CPU host: megatron-core builds and runs ``GPTModel`` and ``HybridModel`` (local layer specs, gloo) where there is
no GPU.

Contract: between ``__enter__`` and ``__exit__`` every CUDA name that Megatron-Core's training path uses has a
stand-in with CUDA's meaning on one in-order device, the CPU; afterwards, also after an exception, every attribute is
what it was. Where CUDA is available nothing is touched.

    with cpu_host() as host:        # a table of Patch(target, name, replacement), applied in order
        model = GPTModel(...)       # torch.cuda.current_device() is torch.device("cpu"), and so on
    # and undone in reverse order

The table (``_patches``) is the whole of it: one row a name, grouped by the reason why it is there.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final, Self, final

import numpy as np
import torch
from torch import Tensor

from layernodes import _cpu_device as device
from layernodes._cpu_linear import HostLinear
from layernodes._cpu_norm import host_norm
from layernodes.errors import NodeStateError
from layernodes.quiet import quiet_import

with quiet_import():
    from megatron.core.models.hybrid import hybrid_block
    from megatron.core.tensor_parallel import random as megatron_random
    from megatron.core.transformer.moe import moe_layer, moe_utils, shared_experts, token_dispatcher

_MISSING: Final = object()
_FACTORIES: Final = (
    *("arange", "as_tensor", "empty", "empty_like", "empty_strided", "eye", "full", "full_like", "linspace"),
    *("logspace", "ones", "ones_like", "rand", "rand_like", "randint", "randint_like", "randn", "randn_like"),
    *("randperm", "tensor", "zeros", "zeros_like"),
)
_FORK_WARNING: Final = "CPU RNG state changed within GPU RNG context"


def cpu_host() -> CpuHost:
    """Return a context manager under which megatron-core runs without a GPU; see ``CpuHost``."""
    return CpuHost()


@final
class CpuHost:
    """Lets megatron-core build and run a ``GPTModel`` or ``HybridModel`` of local layer specs on the CPU while entered.

    Attributes:
        active: True between enter and exit where CUDA is not available; always False where it is.

    The patches are process-wide: enter once, from one thread, around everything that uses Megatron. What runs inside
    may use any number of threads. The object may be entered again after it was left.

    Raises:
        NodeStateError: on entering while this or another host is entered; on leaving a host that is not entered; on
            leaving while somebody else's patch still lies over one of the host's (everything is restored even so).
    """

    def __init__(self) -> None:
        self._undo: ExitStack | None = None
        self._active = False

    @property
    def active(self) -> bool:
        """Whether the stand-ins are in place because of this host."""
        return self._active

    def __enter__(self) -> Self:
        other = _current_host()
        if self._undo is not None or other is not None:
            which = "this cpu_host() is" if self._undo is not None else "another cpu_host() is"
            raise NodeStateError(
                f"{which} already entered; enter one cpu_host() around the whole program, do not nest it"
            )
        with ExitStack() as stack:
            if not torch.cuda.is_available():
                with torch.device("cpu"):  # torch notes its factories at the first use of a default device, for good
                    torch.empty(0)
                _apply(stack, self)
                self._active = True
            self._undo = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._undo is None:
            raise NodeStateError(
                "this cpu_host() is not entered; leave each cpu_host() once, by leaving its `with` block"
            )
        undo, self._undo, self._active = self._undo, None, False
        undo.close()

    def current_device(self) -> torch.device:
        """``torch.cuda.current_device``: the CPU, in the form that every ``device=`` takes."""
        return device.CPU


def _current_host() -> CpuHost | None:
    """The host that is entered now: the one whose method stands in for ``torch.cuda.current_device``."""
    owner = getattr(torch.cuda.current_device, "__self__", None)
    return owner if isinstance(owner, CpuHost) else None


@dataclass(frozen=True, kw_only=True)
class Patch:
    """One attribute to replace while the host is entered."""

    target: Any
    name: str
    replacement: Any

    def apply(self) -> Callable[[], bool]:
        """Set the replacement; returns the function that undoes it and says whether it was still in place.

        An attribute that ``target`` merely inherits is deleted again rather than pinned to what it inherited.
        """
        original = vars(self.target).get(self.name, _MISSING)
        setattr(self.target, self.name, self.replacement)

        def undo() -> bool:
            in_place = vars(self.target).get(self.name, _MISSING) is self.replacement
            if original is not _MISSING:
                setattr(self.target, self.name, original)
            elif self.name in vars(self.target):
                delattr(self.target, self.name)
            return in_place

        return undo


def _apply(stack: ExitStack, host: CpuHost) -> None:
    """Apply the table and turn compilation off; ``stack`` undoes both."""
    overlaid: list[str] = []

    def undo(patch: Patch, restore: Callable[[], bool]) -> None:
        if not restore():
            overlaid.append(f"{getattr(patch.target, '__name__', patch.target)}.{patch.name}")

    def report() -> None:
        if overlaid:
            raise NodeStateError(
                f"something was patched over the CPU host and not taken off before it was left: {', '.join(overlaid)}; "
                "leave in the reverse order of entering"
            )

    stack.callback(report)
    # Megatron's `jit_fuser` is torch.compile, applied at import: compiling each little function would take minutes on a
    # CPU, and fused kernels round differently from one shape to the next.
    stack.enter_context(torch.compiler.set_stance("force_eager"))
    for patch in _patches(host):
        stack.callback(undo, patch, patch.apply())


def _patches(host: CpuHost) -> Iterator[Patch]:
    """The table: every name that gets a stand-in, grouped by why it needs one."""
    yield Patch(target=torch.cuda, name="current_device", replacement=host.current_device)
    yield Patch(target=torch.cuda, name="set_device", replacement=device.ignoring())
    yield from _stream_patches()
    yield from _allocation_patches()
    yield from _generator_patches()
    yield from _recompute_patches()
    yield from _moe_patches()
    yield from _optimizer_patches()


def _stream_patches() -> Iterator[Patch]:
    """Streams and events: the dispatcher's device-to-host copies, the schedule plan, shared experts."""
    streams = device.StreamState()
    for name, stand_in in {
        "Stream": device.HostStream,
        "Event": device.HostEvent,
        "current_stream": streams.current,
        "default_stream": streams.default,
        "set_stream": streams.set,
        "stream": streams.use,
        "synchronize": device.ignoring(),
        "is_current_stream_capturing": device.false,
    }.items():
        yield Patch(target=torch.cuda, name=name, replacement=stand_in)
    # Two classes keep one stream for all their instances, made by the first of them. Given here, it neither outlives
    # the host nor is it missing for a model that an earlier host built.
    yield Patch(
        target=token_dispatcher.MoEAlltoAllTokenDispatcher, name="cuda_dtoh_stream", replacement=device.HostStream()
    )
    yield Patch(target=shared_experts.SharedExpertMLP, name="stream", replacement=device.HostStream())
    # The caching allocator's cross-stream bookkeeping; the CPU has no such allocator and raises.
    yield Patch(target=Tensor, name="record_stream", replacement=device.ignoring())


def _allocation_patches() -> Iterator[Patch]:
    """``device="cuda"`` in factories (causal mask, token counts) and ``Tensor.cuda()`` (rotary positions)."""
    for name in _FACTORIES:
        yield Patch(target=torch, name=name, replacement=device.on_cpu(getattr(torch, name)))
    yield Patch(target=Tensor, name="cuda", replacement=device.itself)


def _generator_patches() -> Iterator[Patch]:
    """The CUDA generator: the CPU's default generator, which is what dropout on a CPU draws from.

    Without CUDA, torch queues ``manual_seed`` until CUDA starts, which is never: all tracker states would be equal and
    each fork would do nothing.
    """
    for module in (torch.cuda, torch.cuda.random):
        for name, stand_in in {
            "get_rng_state": device.get_rng_state,
            "set_rng_state": device.set_rng_state,
            "manual_seed": device.manual_seed,
            "manual_seed_all": device.manual_seed,
            "seed": device.reseed,
            "initial_seed": torch.initial_seed,
        }.items():
            yield Patch(target=module, name=name, replacement=stand_in)
    yield Patch(target=megatron_random, name="_get_cuda_rng_state", replacement=device.get_rng_state)
    yield Patch(target=megatron_random, name="_set_cuda_rng_state", replacement=device.set_rng_state)
    # A fork that sees the CPU generator move logs a warning, since on a GPU that is a mistake; here it always moves.
    logger = logging.getLogger(megatron_random.__name__)
    yield Patch(target=logger, name="filters", replacement=[*logger.filters, _is_not_fork_warning])


def _recompute_patches() -> Iterator[Patch]:
    """``CheckpointWithoutOutput``: names that exist only with Transformer Engine, and a C++ extension.

    Its default ``fp8=False`` is not None and so counts as set: it asks Transformer Engine's state every time.
    """
    if not megatron_random.HAVE_TE:
        yield Patch(target=megatron_random, name="FP8GlobalStateManager", replacement=_NoFP8)
        yield Patch(target=megatron_random, name="fp8_autocast", replacement=_no_context)
        yield Patch(target=megatron_random, name="activation_recompute_forward", replacement=_no_context)
    yield Patch(target=megatron_random, name="_get_share_storage", replacement=_get_share_storage)


def _moe_patches() -> Iterator[Patch]:
    """Token counts as numpy arrays for gloo's splits; latent projections and a hybrid stack's final norm without
    Transformer Engine."""
    for module in (moe_utils, token_dispatcher):
        yield Patch(target=module, name="maybe_move_tensor_to_cpu", replacement=_maybe_move_tensor_to_cpu)
    if not moe_layer.HAVE_TE:
        yield Patch(target=moe_layer, name="HAVE_TE", replacement=True)
        yield Patch(target=moe_layer, name="TELinear", replacement=HostLinear)
        yield Patch(target=hybrid_block, name="TENorm", replacement=host_norm)


def _optimizer_patches() -> Iterator[Patch]:
    """Megatron-Core's optimizers tell parameters apart by names such as ``torch.cuda.FloatTensor``."""
    yield Patch(target=Tensor, name="type", replacement=device.device_type(Tensor.type))


class _NoFP8:
    """``FP8GlobalStateManager`` of a machine without fp8."""

    @staticmethod
    def is_fp8_enabled() -> bool:
        return False

    @staticmethod
    def get_fp8_recipe() -> None:
        return None


def _no_context(**_: object) -> nullcontext[None]:
    """``fp8_autocast`` and ``activation_recompute_forward`` where fp8 does not exist."""
    return nullcontext()


def _is_not_fork_warning(record: logging.LogRecord) -> bool:
    """Keep every log record but the tracker's remark that a fork moved the CPU generator."""
    return record.msg != _FORK_WARNING


def _get_share_storage() -> Callable[[Tensor, Tensor], None]:
    """Stand-in for the compiled extension of ``CheckpointWithoutOutput``."""
    return device.share_storage


def _maybe_move_tensor_to_cpu(
    tensor: Any, as_numpy: bool = False, record_stream: bool = False
) -> Tensor | np.ndarray[Any, Any] | Any:
    """Megatron's function, which converts to numpy only what it moved from a GPU; gloo wants numbers, not tensors."""
    return tensor.detach().numpy().copy() if as_numpy and isinstance(tensor, Tensor) else tensor
