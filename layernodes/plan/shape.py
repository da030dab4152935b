"""The shape of a model chunk: which slots its layers have, on which stream, and which defer weight gradients.

A shape is all that the rules, the built-in schedules and the simulator know of a model. ``ChunkPlan.build`` reads it
off a model; ``ChunkShape.of`` writes one down without a model.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, Self, final

from layernodes.errors import PlanError
from layernodes.plan.arguments import check_argument, check_items
from layernodes.plan.slot_order import in_order
from layernodes.plan.step import Step
from layernodes.slots import POST_PROCESS, PRE_PROCESS, ExtraSlot, Slot, StreamType, is_slot_name

SLOT_STREAMS: Final[Mapping[Slot, StreamType]] = {
    slot: StreamType.COMM if slot in (Slot.MOE_DISPATCH, Slot.MOE_COMBINE) else StreamType.COMPUTE for slot in Slot
}
"""The stream on which Megatron-Core runs each slot."""

DEFERRED_SLOTS: Final = (Slot.PRE_DISPATCH_COMPUTATION, Slot.MLP)
"""The slots whose weight gradients ``wgrad=True`` defers: those that Megatron-Core drains."""

_USED_BY_KIND: Final[Mapping[str, Collection[Slot]]] = {
    "moe": frozenset(Slot) - {Slot.MTP_POST_PROCESS},
    "dense": frozenset(DEFERRED_SLOTS),
}


@final
@dataclass(frozen=True, kw_only=True)
class SlotShape:
    """One slot of one layer, or one end of a chunk.

    Attributes:
        name: the slot's name in a step's text.
        stream: the stream on which it runs.
        passthrough: the layer does nothing there, so that schedules may leave its steps out.
        wgrad: its weight gradients are deferred, so that it has ``W`` steps.

    Raises:
        PlanError: a name that is no slot's, or a pass-through that defers.
    """

    name: str
    stream: StreamType = StreamType.COMPUTE
    passthrough: bool = False
    wgrad: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", str(self.name))
        check_argument("stream", self.stream, StreamType, advice="give StreamType.COMPUTE or StreamType.COMM")
        if not is_slot_name(self.name):
            raise PlanError(f"{self.name!r} cannot name a slot; choose an identifier other than L and digits")
        if self.passthrough and self.wgrad:
            raise PlanError(f"{self.name} is a pass-through and has no weight gradients to defer; drop wgrad=True")


@final
@dataclass(frozen=True, kw_only=True)
class LayerShape:
    """The slots of one layer, in forward order.

    Attributes:
        kind: ``"moe"``, ``"dense"`` or a word of the user's own; for people, no rule reads it.
        slots: the slots in forward order, pass-throughs included.
        mtp: whether it is a multi-token-prediction layer.

    Raises:
        PlanError: two slots share a name.
    """

    kind: str
    slots: tuple[SlotShape, ...]
    mtp: bool = False

    def __post_init__(self) -> None:
        check_items("slots", self.slots, SlotShape)
        object.__setattr__(self, "slots", tuple(self.slots))
        names = self.slot_names
        if len(set(names)) != len(names):
            raise PlanError(f"two slots of a layer share a name: {', '.join(names)}; give each slot its own name")

    @classmethod
    def of(
        cls,
        kind: str = "moe",
        *,
        mtp: bool = False,
        wgrad: bool | Collection[str] = False,
        split_combine: bool = False,
        extra_slots: Sequence[ExtraSlot] = (),
        uses: Collection[Slot] | None = None,
    ) -> Self:
        """The shape of a Megatron-Core layer, or of any layer cut into Megatron-Core's slots.

        Args:
            kind: ``"moe"`` or ``"dense"``; any word where ``uses`` is given.
            mtp: a multi-token-prediction layer, whose post-process slot does something.
            wgrad: True defers pre_dispatch_computation and mlp; a collection names the slots to defer instead.
            split_combine: add the slot ``post_combine``.
            extra_slots: the user's own slots; several after one slot stand in the given order.
            uses: the slots that are no pass-through; None takes those of the kind.

        Raises:
            PlanError: unknown kind, an extra slot after one that is not there, or in a circle; a deferred slot that is
                not there.
        """
        check_argument("kind", kind, str, advice="give 'moe' or 'dense'")
        check_items("extra_slots", extra_slots, ExtraSlot)
        if not isinstance(wgrad, bool):
            check_items("wgrad", wgrad, str, advice="give True, False, or names of slots in a list")
        if uses is None:
            if kind not in _USED_BY_KIND:
                raise PlanError(
                    f"unknown kind of layer {kind!r}; choose one of {', '.join(_USED_BY_KIND)} or give uses="
                )
            uses = {*_USED_BY_KIND[kind], *([Slot.MTP_POST_PROCESS] if mtp else [])}
        check_items("uses", uses, str, advice="give the slots that are no pass-through")
        deferred: Collection[str] = DEFERRED_SLOTS if wgrad is True else wgrad or ()
        own = [slot for slot in Slot if split_combine or slot is not Slot.POST_COMBINE]
        slots = [
            SlotShape(
                name=slot,
                stream=SLOT_STREAMS[slot],
                passthrough=slot not in uses,
                wgrad=slot in deferred and slot in uses,
            )
            if isinstance(slot, Slot)
            else SlotShape(name=slot.name, stream=slot.stream, wgrad=slot.name in deferred)
            for slot in in_order(own, extra_slots)
        ]
        unknown = [name for name in deferred if name not in {slot.name for slot in slots}]
        if unknown:
            raise PlanError(
                f"wgrad names {', '.join(unknown)}; this layer has {', '.join(slot.name for slot in slots)}"
            )
        return cls(kind=kind, slots=tuple(slots), mtp=mtp)

    @property
    def slot_names(self) -> tuple[str, ...]:
        """Names of the slots, in forward order."""
        return tuple(slot.name for slot in self.slots)

    @property
    def passthrough(self) -> frozenset[str]:
        """Names of the slots whose steps may be left out."""
        return frozenset(slot.name for slot in self.slots if slot.passthrough)

    @property
    def wgrad_slots(self) -> tuple[str, ...]:
        """Names of the slots that have ``W`` steps, in forward order."""
        return tuple(slot.name for slot in self.slots if slot.wgrad)

    def find(self, name: str) -> SlotShape | None:
        """The slot of this name, or None."""
        return next((slot for slot in self.slots if slot.name == name), None)


class Place(NamedTuple):
    """A slot of a chunk: the layer's number (None for the chunk's ends) and the slot."""

    layer: int | None
    slot: SlotShape


_ENDS: Final = {name: SlotShape(name=name) for name in (PRE_PROCESS, POST_PROCESS)}


@final
@dataclass(frozen=True, kw_only=True)
class ChunkShape:
    """The slots of one model chunk.

    Attributes:
        layers: decoder layers, then MTP layers; a step's layer number is its index here.
        pre_process: whether the chunk has a head with steps of its own.
        post_process: whether it has a tail with steps of its own.

    Raises:
        PlanError: a decoder layer stands after an MTP layer.
    """

    layers: tuple[LayerShape, ...] = ()
    pre_process: bool = True
    post_process: bool = True

    def __post_init__(self) -> None:
        check_items("layers", self.layers, LayerShape)
        object.__setattr__(self, "layers", tuple(self.layers))
        flags = [layer.mtp for layer in self.layers]
        if flags != sorted(flags):
            raise PlanError("a decoder layer stands after an MTP layer; list the decoder's layers first")

    @classmethod
    def of(
        cls,
        layers: Sequence[str],
        *,
        mtp: int | Sequence[str] = 0,
        pre_process: bool = True,
        post_process: bool = True,
        wgrad: bool | Collection[str] = False,
        split_combine: bool = False,
        extra_slots: Sequence[ExtraSlot] = (),
    ) -> Self:
        """Write a shape down without a model.

        Args:
            layers: kind of each decoder layer, ``"moe"`` or ``"dense"``.
            mtp: number of MTP layers, which are MoE layers, or the kind of each.
            pre_process: whether the chunk has a head.
            post_process: whether the chunk has a tail.
            wgrad: True defers pre_dispatch_computation and mlp of every layer; a collection names slots instead.
            split_combine: give every layer the slot ``post_combine``.
            extra_slots: the user's own slots, in every layer.

        Raises:
            PlanError: an unknown kind, a negative number of MTP layers, an extra or deferred slot that does not fit.
        """
        if isinstance(layers, str):
            raise PlanError(f"layers is the text {layers!r}; give a list with one kind a layer, such as [{layers!r}]")
        if not isinstance(layers, Iterable):
            raise PlanError(f"layers is {layers!r}; give a list with one kind a layer, such as ['moe', 'moe']")
        if not isinstance(mtp, int):
            check_items("mtp", mtp, str, advice="give the number of MTP layers, or the kind of each in a list")
        elif mtp < 0:
            raise PlanError(f"mtp={mtp}; give the number of MTP layers, 0 or more, or the kind of each")
        mtp_kinds = ["moe"] * mtp if isinstance(mtp, int) else mtp
        return cls(
            layers=tuple(
                LayerShape.of(kind, mtp=is_mtp, wgrad=wgrad, split_combine=split_combine, extra_slots=extra_slots)
                for kinds, is_mtp in ((layers, False), (mtp_kinds, True))
                for kind in kinds
            ),
            pre_process=pre_process,
            post_process=post_process,
        )

    @property
    def num_layers(self) -> int:
        """Number of layers, MTP layers included."""
        return len(self.layers)

    @property
    def wgrad_slots(self) -> tuple[tuple[str, ...], ...]:
        """For each layer, the names of the slots that have ``W`` steps."""
        return tuple(layer.wgrad_slots for layer in self.layers)

    @property
    def ends(self) -> tuple[str, ...]:
        """Which of ``pre_process`` and ``post_process`` the chunk has."""
        return (*([PRE_PROCESS] if self.pre_process else []), *([POST_PROCESS] if self.post_process else []))

    def places(self) -> Iterator[Place]:
        """Every slot of the chunk in forward order, ends and pass-throughs included."""
        if self.pre_process:
            yield Place(None, _ENDS[PRE_PROCESS])
        for number, layer in enumerate(self.layers):
            for slot in layer.slots:
                yield Place(number, slot)
        if self.post_process:
            yield Place(None, _ENDS[POST_PROCESS])

    def find(self, step: Step) -> SlotShape | None:
        """The slot that a step is of, or None where the chunk has none such."""
        check_argument("step", step, Step)
        if step.layer is None:
            return _ENDS[step.slot] if step.slot in self.ends else None
        return self.layers[step.layer].find(step.slot) if step.layer < len(self.layers) else None

    def __str__(self) -> str:
        """One line, e.g. ``pre_process | L0 moe | L1 dense | post_process; W: pre_dispatch_computation, mlp``."""
        parts = [f"L{number} {layer.kind}{' mtp' if layer.mtp else ''}" for number, layer in enumerate(self.layers)]
        parts = [*self.ends[: self.pre_process], *parts, *self.ends[self.pre_process :]]
        deferred = dict.fromkeys(name for names in self.wgrad_slots for name in names)
        return (" | ".join(parts) or "empty chunk") + (f"; W: {', '.join(deferred)}" if deferred else "")


def check_shapes(**shapes: object) -> None:
    """Raise ArgumentError where one of a pair's shapes is neither a ChunkShape nor None."""
    for name, shape in shapes.items():
        check_argument(name, shape, ChunkShape, type(None))
