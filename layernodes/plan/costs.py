"""What each step of a model costs: seconds by slot and phase, and the bytes that it keeps.

A cost is looked up at the layer's own entry first, then at the kind of the layer::

    cost(layer 3, "mlp")  =  layers[3]["mlp"]  if there,  else  kinds[kind of layer 3]["mlp"]

A ``B`` stands for input gradients alone. Where the shape does not defer a slot's weight gradients, its ``B`` step
computes them too, and takes ``B + W`` seconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Annotated, Self, final

from pydantic import Field, ValidationError, field_validator

from layernodes.errors import CostError
from layernodes.plan.arguments import check_argument
from layernodes.plan.closest import closest
from layernodes.plan.file_kinds import COSTS, found_instead
from layernodes.plan.grid import usual_stream
from layernodes.plan.measurement import Measurement
from layernodes.plan.shape import ChunkShape
from layernodes.plan.step import Step
from layernodes.plan.strict_model import NUMBER, StrictModel, check_amounts, find_faults
from layernodes.slots import CHUNK_ENDS, Phase, Slot, StreamType, is_slot_name

Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False), NUMBER]
Bytes = Annotated[int, Field(ge=0), NUMBER]
Factor = Annotated[float, Field(ge=1, allow_inf_nan=False), NUMBER]
SlotName = str


@final
class SlotCost(StrictModel):
    """What one slot of one layer costs for one microbatch.

    Attributes:
        F: seconds of the forward.
        B: seconds of the input gradients.
        W: seconds of the weight gradients, whether deferred or not.
        activation_bytes: what the forward keeps for the backward: held from its ``F`` to the end of its ``B``.
        wgrad_bytes: what a deferred ``W`` keeps waiting for it: held from its ``B`` to the end of its ``W``.

    Raises:
        CostError: a negative or infinite number, an unknown field, or a value of another type; names each.
    """

    F: Seconds = 0.0
    B: Seconds = 0.0
    W: Seconds = 0.0
    activation_bytes: Bytes = 0
    wgrad_bytes: Bytes = 0

    def seconds(self, phase: Phase, *, deferred: bool) -> float:
        """Seconds of one phase; a ``B`` whose weight gradients are not deferred computes them too."""
        if phase is Phase.F:
            return self.F
        if phase is Phase.W:
            return self.W
        return self.B if deferred else self.B + self.W

    def acquires(self, phase: Phase, *, deferred: bool) -> int:
        """Bytes that a step of this phase begins to hold; of a ``B``, what its ``W`` needs, where that is deferred."""
        if phase is Phase.F:
            return self.activation_bytes
        return self.wgrad_bytes if phase is Phase.B and deferred else 0

    def releases(self, phase: Phase) -> int:
        """Bytes that are no longer held when a step of this phase is over."""
        if phase is Phase.F:
            return 0
        return self.activation_bytes if phase is Phase.B else self.wgrad_bytes


FREE = SlotCost()
"""The cost of a slot that does nothing."""


@final
class CostModel(StrictModel):
    """The costs of a model on a machine. A value; ``load`` and ``save`` keep it in a JSON file.

    Attributes:
        name: what these costs are of, for people.
        kinds: for each kind of layer (``"moe"``, ``"dense"`` or your own), the cost of each of its slots.
        layers: for single layers, by number, the costs of slots that differ from those of their kind.
        ends: costs of ``pre_process`` and ``post_process``; free where left out.
        streams: streams of slots that are not Megatron-Core's; COMPUTE where left out. Used only where no shape says.
        compute_slowdown: how many times longer computation takes while a communication step runs; see ``simulate``.
        communication_slowdown: how many times longer communication takes while a computing step runs, as where the
            processors that compute also move the bytes.
        hardware_queues: 2 or more: the streams do not hold each other up. 1: both are fed from one queue, as with
            ``CUDA_DEVICE_MAX_CONNECTIONS=1``, and no step starts before the one launched before it has started.
        measurement: how the costs were measured, and how far the times spread; None where nobody measured them.

    Raises:
        CostError: a negative or infinite number, an unknown field, or a value of another type; names each.
    """

    name: str = ""
    kinds: Mapping[str, Mapping[SlotName, SlotCost]]
    layers: Mapping[Annotated[int, Field(ge=0)], Mapping[SlotName, SlotCost]] = {}
    ends: Mapping[str, SlotCost] = {}
    streams: Mapping[SlotName, StreamType] = {}
    compute_slowdown: Factor = 1.0
    communication_slowdown: Factor = 1.0
    hardware_queues: Annotated[int, Field(ge=1), NUMBER] = 2
    measurement: Measurement | None = None

    @field_validator("kinds", "layers")
    @classmethod
    def _check_slots(cls, value: Mapping[object, Mapping[str, SlotCost]]) -> Mapping[object, Mapping[str, SlotCost]]:
        for costs in value.values():
            for slot in costs:
                if not is_slot_name(slot) or slot in CHUNK_ENDS:
                    raise ValueError(f"{slot!r} is no slot of a layer; costs of {', '.join(CHUNK_ENDS)} go into 'ends'")
        return value

    @field_validator("ends")
    @classmethod
    def _check_ends(cls, value: Mapping[str, SlotCost]) -> Mapping[str, SlotCost]:
        unknown = [name for name in value if name not in CHUNK_ENDS]
        if unknown:
            raise ValueError(f"{unknown[0]!r} is no end of a chunk; choose {' or '.join(CHUNK_ENDS)}")
        return value

    @classmethod
    def simple(
        cls,
        *,
        computation: float,
        communication: float,
        backward: float = 1.0,
        wgrad: float = 1.0,
        compute_slowdown: float = 1.0,
        communication_slowdown: float = 1.0,
        hardware_queues: int = 2,
    ) -> Self:
        """Costs for trying things out: every computing slot alike, every communication alike, ends free.

        Args:
            computation: seconds of the forward of pre_dispatch_computation and of mlp.
            communication: seconds of dispatch and of combine, forward or backward.
            backward: input gradients of a computing slot, in units of ``computation``.
            wgrad: weight gradients of a computing slot, in units of ``computation``.
            compute_slowdown: see the attribute.
            communication_slowdown: see the attribute.
            hardware_queues: see the attribute.

        Raises:
            CostError: a number is negative or not finite.
        """
        check_amounts(computation=computation, communication=communication, backward=backward, wgrad=wgrad)
        compute = SlotCost(F=computation, B=computation * backward, W=computation * wgrad, activation_bytes=1)
        comm = SlotCost(F=communication, B=communication, activation_bytes=1)
        dense: dict[str, SlotCost] = {Slot.PRE_DISPATCH_COMPUTATION: compute, Slot.MLP: compute}
        moe: dict[str, SlotCost] = {**dense, Slot.MOE_DISPATCH: comm, Slot.MOE_COMBINE: comm}
        free: dict[str, SlotCost] = {Slot.POST_COMBINE: FREE, Slot.MTP_POST_PROCESS: FREE}
        return cls(
            name="simple",
            kinds={"moe": {**moe, **free}, "dense": {**dense, **free}},
            compute_slowdown=compute_slowdown,
            communication_slowdown=communication_slowdown,
            hardware_queues=hardware_queues,
        )

    def cost(self, *, layer: int | None, kind: str, slot: str) -> SlotCost:
        """The cost of a slot that does something.

        Args:
            layer: number of the layer; None for the chunk's ends.
            kind: kind of the layer; not looked at for the ends.
            slot: name of the slot.

        Raises:
            CostError: the model has none.
        """
        check_argument("kind", kind, str)
        check_argument("slot", slot, str)
        if layer is None:
            return self.ends.get(slot, FREE)
        check_argument("layer", layer, int)
        own = self.layers.get(layer, {})
        if slot in own:
            return own[slot]
        if kind not in self.kinds:
            raise CostError(
                f"no costs for layers of kind {kind!r} (layer {layer}); this model has "
                f"{', '.join(map(repr, self.kinds)) or 'none'}: add kinds[{kind!r}], or layers[{layer}][{slot!r}]"
            )
        found = self.kinds[kind].get(slot)
        if found is None:
            meant = closest(slot, tuple(self.kinds[kind]))
            hint = f" (it has {meant!r})" if meant else ""
            raise CostError(
                f"no cost for slot {slot!r} of layer {layer}, which is of kind {kind!r}{hint}; add "
                f"kinds[{kind!r}][{slot!r}], with zeros if it is free"
            )
        return found

    def table(self, shape: ChunkShape) -> dict[tuple[int | None, str], SlotCost]:
        """The cost of every slot of a chunk of this ``shape``, by layer and slot; pass-throughs are free.

        Raises:
            CostError: a slot has none.
        """
        check_argument("shape", shape, ChunkShape)
        return {
            (layer, slot.name): FREE
            if slot.passthrough
            else self.cost(layer=layer, kind="" if layer is None else shape.layers[layer].kind, slot=slot.name)
            for layer, slot in shape.places()
        }

    @property
    def has_slowdown(self) -> bool:
        """Whether the two streams slow each other down."""
        return max(self.compute_slowdown, self.communication_slowdown) > 1

    def stream_of(self, step: Step) -> StreamType:
        """The stream of a step where there is no shape: as in ``streams``, else Megatron-Core's."""
        check_argument("step", step, Step)
        return self.streams.get(step.slot) or usual_stream(step)

    def scale(self, *, computation: float = 1.0, communication: float = 1.0) -> Self:
        """The same costs with the seconds of one stream, or both, multiplied: "what if the link were twice as fast".

        Args:
            computation, communication: what to multiply the seconds of each stream's slots by.

        Raises:
            CostError: a factor is negative or not finite.
        """
        check_amounts(computation=computation, communication=communication)

        def scaled(costs: Mapping[str, SlotCost]) -> dict[str, SlotCost]:
            return {slot: _times(cost, factor_of(slot)) for slot, cost in costs.items()}

        def factor_of(slot: str) -> float:
            stream = self.stream_of(Step(Phase.F, 0, None, slot))
            return communication if stream is StreamType.COMM else computation

        return self.model_copy(
            update={
                "kinds": {kind: scaled(costs) for kind, costs in self.kinds.items()},
                "layers": {layer: scaled(costs) for layer, costs in self.layers.items()},
                "ends": scaled(self.ends),
            }
        )

    def to_json(self) -> str:
        """JSON text that ``from_json`` reads back, without the fields that are at their defaults."""
        return self.model_dump_json(indent=2, exclude_defaults=True)

    @classmethod
    def from_json(cls, text: str, *, source: str = "cost model") -> Self:
        """Read JSON text; ``source`` is what errors call it.

        Raises:
            CostError: no JSON, or no cost model; every fault with its place.
        """
        check_argument("text", text, str)
        try:
            return cls.model_validate_json(text)
        except ValidationError as error:
            faults = found_instead(text, COSTS) or tuple(find_faults(error, cls))
            raise CostError(f"{source} cannot be read: " + "\n  ".join(faults), faults=faults) from None

    @classmethod
    def load(cls, path: str | PathLike[str]) -> Self:
        """Read the JSON file at ``path``, in UTF-8, with or without a byte order mark.

        Raises:
            CostError: it holds no cost model; names the file and every fault.
            OSError: it cannot be read.
        """
        check_argument("path", path, str, PathLike)
        try:
            text = Path(path).read_text(encoding="utf-8-sig")
        except UnicodeDecodeError as error:
            raise CostError(f"{path} cannot be read: byte {error.start} is no UTF-8") from None
        return cls.from_json(text, source=str(path))

    def save(self, path: str | PathLike[str]) -> None:
        """Write a JSON file at ``path``, in UTF-8.

        Raises:
            OSError: it cannot be written.
        """
        check_argument("path", path, str, PathLike)
        Path(path).write_text(self.to_json() + "\n", encoding="utf-8")


def _times(cost: SlotCost, factor: float) -> SlotCost:
    return cost.model_copy(update={"F": cost.F * factor, "B": cost.B * factor, "W": cost.W * factor})
