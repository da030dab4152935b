"""What is legal and probably not meant: a node whose work lies on the other stream than it should, and a method whose
name is almost that of a hook.

run every microbatch serially, without deferral, and note the operations of the node's forward of the first:
a product of matrices on the communication stream      unless by a weight with which the library's own node does it
an all-to-all on the compute stream                    unless in the library's own node (context parallelism)
a subclass of one of the library's exchanges on the compute stream
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from types import FunctionType
from typing import Any, Final, final

import torch
from torch.nn import Parameter
from torch.utils._python_dispatch import TorchDispatchMode

from layernodes.lane import tensors_in
from layernodes.nodes import CombineNode, DispatchNode, ScheduleNode
from layernodes.nodes.layer_node import LayerNode
from layernodes.plan import schedules
from layernodes.plan.registry import SlotKey
from layernodes.plan.step import Step
from layernodes.slots import Phase, Slot, StreamType
from layernodes.testing.bench import NodeBench

_aten: Final = torch.ops.aten
_PRODUCTS: Final = frozenset(
    (_aten.mm.default, _aten.addmm.default, _aten.bmm.default, _aten.baddbmm.default, _aten.convolution.default)
)
_EXCHANGES: Final = frozenset(
    (
        torch.ops.c10d.alltoall_.default,
        torch.ops.c10d.alltoall_base_.default,
        torch.ops._c10d_functional.all_to_all_single.default,
    )
)

_HOOKS: Final = ("forward", "wgrad_hook", "modules", "frees_input", "keeps_input", "touches_rng")
_ALIKE: Final = 0.8
"""Twice what is alike over both lengths: 'froward' passes for 'forward', and 'forward_experts' does not."""


def stream_notes(bench: NodeBench, slot: SlotKey) -> list[str]:
    """What the nodes at ``slot`` do on a stream that is not made for it; nothing of the library's own."""
    nodes = [plan.nodes[slot] for plan in bench.chunk.layers if slot in plan.nodes]
    watch = _Operations(slot, {p.untyped_storage()._cdata for node in nodes for p in _of_library(node)})
    with watch:
        bench.run(
            schedules.serial(bench.chunk.shape, bench.num_microbatches), before_step=watch.begin, after_step=watch.end
        )
    return list(dict.fromkeys(note for node in nodes for note in _notes(node, watch.seen)))


def name_notes(node: ScheduleNode) -> list[str]:
    """Methods of a user's class that look like hooks of ``ScheduleNode`` and have a name that nothing calls."""
    known = {name for kind in ScheduleNode.__mro__ for name in vars(kind)}
    own = dict.fromkeys(
        name
        for kind in type(node).__mro__
        if not kind.__module__.startswith("layernodes.")
        for name, value in vars(kind).items()
        if isinstance(value, FunctionType) and name not in known and not name.startswith("__")
    )
    kind = type(node).__name__
    notes = [
        f"{kind}.{name} is no method of ScheduleNode, and no run calls it; did you mean {meant}?"
        for name in own
        for meant in get_close_matches(name, _HOOKS, n=1, cutoff=_ALIKE)
    ]
    if "backward" in own:
        notes.append(
            f"{kind}.backward is no method of ScheduleNode, and no run calls it: autograd goes backward through "
            f"forward; put a gradient of your own into a torch.autograd.Function that forward uses"
        )
    return notes


def _notes(node: ScheduleNode, seen: Counter[Any]) -> Iterator[str]:
    name = type(node).__name__
    products, exchanges = (_listed(seen, kinds) for kinds in (_PRODUCTS, _EXCHANGES))
    if node.stream is StreamType.COMM and products:
        yield (
            f"{name} multiplies matrices on the communication stream ({products} in a forward), where the exchanges of "
            f"other microbatches wait for it; let a compute slot do that, before or after it, or one of your own "
            f"(ExtraSlot)"
        )
    if node.stream is StreamType.COMM:
        return
    base = next((kind for kind in (DispatchNode, CombineNode) if isinstance(node, kind)), None)
    if base is not None:
        yield (
            f"{name} is a {base.__name__} and declares StreamType.COMPUTE, where nothing hides its exchange; leave "
            f"'stream' out"
        )
    elif exchanges and not isinstance(node, LayerNode):
        yield (
            f"{name} exchanges tokens on the compute stream ({exchanges} in a forward), where nothing hides it; "
            f"declare StreamType.COMM, and let a compute slot do the rest"
        )


def _listed(seen: Counter[Any], kinds: frozenset[Any]) -> str:
    return ", ".join(f"{count} {kind.overloadpacket.__name__}" for kind, count in seen.items() if kind in kinds)


def _of_library(node: ScheduleNode) -> Iterator[Parameter]:
    """The weights of the layer that one of the library's nodes uses, without those that a subclass holds."""
    if isinstance(node, LayerNode):
        added = {id(p) for module in ScheduleNode.modules(node) for p in module.parameters()}
        yield from (p for module in node.modules() for p in module.parameters() if id(p) not in added)


@final
class _Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]  # its __init_subclass__ is untyped in torch
    """Counts products and exchanges in the forward of one slot of microbatch 0.

    Args:
        slot: the slot.
        skipped: ids of storages; products with one of them do not count.
    """

    def __init__(self, slot: SlotKey, skipped: set[int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # untyped in torch
        self.seen: Counter[Any] = Counter()
        self._slot = slot.value if isinstance(slot, Slot) else slot.name
        self._skipped = skipped
        self._is_on = False

    def begin(self, step: Step) -> None:
        """A step begins; for ``Runner(before_step=...)``."""
        self._is_on = step.phase is Phase.F and step.slot == self._slot and step.microbatch == 0 and step.layer == 0

    def end(self, step: Step) -> None:
        """It is over; for ``Runner(after_step=...)``."""
        self._is_on = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Count, and run."""
        if self._is_on and (func in _EXCHANGES or (func in _PRODUCTS and not self._is_skipped(args))):
            self.seen[func] += 1
        return func(*args, **(kwargs or {}))

    def _is_skipped(self, args: Sequence[Any]) -> bool:
        return any(tensor.untyped_storage()._cdata in self._skipped for tensor in tensors_in(list(args)))
