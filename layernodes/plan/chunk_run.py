"""One microbatch on one chunk: opened once, its steps run in any valid order with other microbatches', then empty."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor

from layernodes._megatron.chunk import ChunkState, ModelChunk
from layernodes._megatron.shared_parameters import SharedGradients
from layernodes.errors import BatchError, NodeStateError
from layernodes.lane import Lane
from layernodes.plan.layer_hooks import LayerHooks
from layernodes.plan.output_gradients import gradients_of
from layernodes.plan.slot_run import LayerState, SlotRun, Values
from layernodes.slots import Phase
from layernodes.state import handoffs_of

if TYPE_CHECKING:
    from layernodes.plan.chunk_places import ChunkPlace
    from layernodes.plan.chunk_plan import ChunkPlan


@final
class ChunkRun:
    """The state of one microbatch on one chunk; ``ChunkPlan.open`` makes one.

    It may stay open between calls of a runner: forward in one, backward in another.

    Attributes:
        plan: the chunk's plan.
        output: what the chunk returned, without a graph; None until its forward is done.
        input_grad: gradient of the chunk's input; None until its backward is done, and where there is none.
        shared: the sums of gradients of parameters that several nodes use.
    """

    __slots__ = (
        "_gradient",
        "_hooks",
        "_is_input",
        "_layer_states",
        "_slots",
        "_state",
        "_value",
        "input_grad",
        "output",
        "plan",
        "shared",
    )

    def __init__(self, plan: ChunkPlan, chunk: ModelChunk | None, batch: Any) -> None:
        self.plan = plan
        self.output: Any = None
        self.input_grad: Tensor | None = None
        self._state, given = _begin(chunk, batch)
        self._value: Values | None = () if given is None else (given,)
        self._is_input = True  # the caller's own tensor, whose storage is not ours to free
        self._gradient: Values | None = None
        self._layer_states: list[LayerState] = [LayerState() for _ in plan.layers]
        self._slots: list[SlotRun | None] = [None] * len(plan.places)
        self.shared = SharedGradients()
        self._hooks: dict[int, list[LayerHooks]] = {}

    def add_hooks(self, layer: int, hooks: LayerHooks) -> None:
        """Call ``hooks`` around this microbatch's passes through a layer, after those added before.

        Args:
            layer: number of the layer, through decoder then MTP.
            hooks: the functions; they are given the layer of the plan.
        """
        self._hooks.setdefault(layer, []).append(hooks)

    def begin_layer(self, index: int, phase: Phase) -> None:
        """Call what is to be called before the pass of ``phase`` through the layer of the place ``index``."""
        layer = self.plan.places[index].layer
        if layer is not None:
            for hooks in self._hooks.get(layer, ()):
                call = hooks.before(phase)
                if call is not None:
                    call(self.plan.layers[layer].layer)

    def end_layer(self, index: int, phase: Phase) -> None:
        """Call what is to be called after the pass of ``phase`` through the layer of the place ``index``."""
        layer = self.plan.places[index].layer
        if layer is not None:
            for hooks in self._hooks.get(layer, ()):
                call = hooks.after(phase)
                if call is not None:
                    call(self.plan.layers[layer].layer)

    def forward(self, index: int, lane: Lane | None = None) -> None:
        """Run the forward of the slot at place ``index``; ``lane`` is told of storages, and None on inline streams.

        Raises:
            NodeStateError: it has run already.
        """
        place = self.plan.places[index]
        if place.node is None:
            return
        if self._value is None or self._slots[index] is not None:
            raise NodeStateError(f"F of {_text(place)} runs a second time for one microbatch; a run is used once")
        records = torch.is_grad_enabled()
        slot = SlotRun(
            place,
            None if place.layer is None else self._layer_states[place.layer],
            self._state,
            place.new_hook() if place.new_hook is not None and records else None,
        )
        previous, self._value = self._value, None
        if lane is not None:
            lane.may_use(vars(self._state))
            if place.layer is not None:
                lane.uses(handoffs_of(slot.layer_state).waiting(place.reads))
        self._value = slot.forward(previous, lane, self.shared, keeps_input=self._is_input)
        self._is_input = False
        if records:
            self._slots[index] = slot

    def end_forward(self) -> Any:
        """Take the chunk's output, without its graph.

        No handoff is left then: one that nobody reads is refused when the plan is built, one that its reader left, by
        the reader's call.

        Raises:
            NodeStateError: the forward has not run.
        """
        if self._value is None:
            raise NodeStateError("the forward of this microbatch has not run; run its F steps first")
        detached = tuple(t.detach() if isinstance(t, Tensor) else t for t in self._value)
        self._value = None
        self.output = detached[0] if len(detached) == 1 else detached
        return self.output

    @property
    def value(self) -> Any:
        """What the latest forward slot returned, as a leaf that requires grad; what a pipeline sends on."""
        value = self.output if self._value is None else self._value[0] if len(self._value) == 1 else self._value
        return value.detach().requires_grad_(True) if isinstance(value, Tensor) else value

    def hand_over(self) -> Tensor | None:
        """The very tensor that the last slot returned, graph included, for a pipeline that empties it once it is sent.

        ``output`` then has its shape alone, on the meta device, so that nothing but what backward saved keeps its
        storage. None where it would not be freed: several outputs, a view, or one without a graph.
        """
        outputs = next((slot.outputs for slot in reversed(self._slots) if slot is not None), ())
        handed: Tensor | None = outputs[0] if len(outputs) == 1 else None
        if handed is None or handed.grad_fn is None or handed._is_view():
            return None
        self.output = torch.empty_like(handed, device="meta")
        return handed

    @property
    def gradient(self) -> Tensor | None:
        """The gradient that the latest backward slot returned; what a pipeline sends back."""
        return self._gradient[0] if self._gradient else self.input_grad

    def begin_backward(self, gradient: Any) -> None:
        """Hand over the gradient of the output; None: ones like it.

        Raises:
            NodeStateError: there are more or fewer gradients than outputs, one has another shape than its output, or no
                output is a tensor.
        """
        self._gradient = gradients_of(self.output, gradient)

    def backward(self, index: int, lane: Lane | None = None) -> None:
        """Run the backward of the slot at place ``index``; ``lane`` as for ``forward``.

        Raises:
            NodeStateError: its forward has not run, or its backward has.
        """
        place = self.plan.places[index]
        if place.node is None:
            return
        slot = self._slots[index]
        if place.new_hook is None:
            self._slots[index] = None
        if slot is None or self._gradient is None:
            raise NodeStateError(
                f"B of {_text(place)} runs before its F, or a second time; run each slot's F first, and each B once"
            )
        gradient, self._gradient = self._gradient, None
        self._gradient = slot.backward(gradient, lane)

    def weight_gradients(self, index: int, lane: Lane | None = None) -> None:
        """Compute and deliver the weight gradients that the backward of the slot at place ``index`` deferred; ``lane``
        as for ``forward``.

        Raises:
            NodeStateError: its backward has not run, or these are computed already.
        """
        slot, self._slots[index] = self._slots[index], None
        if slot is None:
            raise NodeStateError(f"W of {_text(self.plan.places[index])} runs before its B, or a second time")
        slot.weight_gradients(lane)

    def end_backward(self) -> Tensor | None:
        """Take the gradient of the chunk's input; None where there is none."""
        gradient, self._gradient = self._gradient, None
        self.input_grad = gradient[0] if gradient else None
        return self.input_grad

    def pending_wgrads(self) -> tuple[str, ...]:
        """The slots whose backward deferred weight gradients that have not been computed, with the parameters."""
        return tuple(
            f"{_text(place)} ({', '.join(self._names(place))})"
            for place, slot in zip(self.plan.places, self._slots, strict=True)
            if slot is not None and slot.owes_wgrads
        )

    def _names(self, place: ChunkPlace) -> list[str]:
        layer = self.plan.layers[place.layer or 0].layer
        return [name for name, parameter in layer.named_parameters() if id(parameter) in place.deferred]

    def close(self) -> None:
        """Forget everything but ``output`` and ``input_grad``.

        Raises:
            NodeStateError: weight gradients that a backward deferred have not been computed; lists them.
        """
        pending = self.pending_wgrads()
        self.discard()
        if pending:
            raise NodeStateError(
                f"closed with weight gradients that no W step computed: {'; '.join(pending)}; run the W of each B"
            )

    def discard(self) -> None:
        """``close`` after a failure: whatever is pending goes too."""
        for slot in self._slots:
            if slot is not None:
                slot.close()
        self._slots = [None] * len(self._slots)
        self._layer_states = []
        self._state = None
        self._value = self._gradient = None
        self.shared = SharedGradients()


def _begin(chunk: ModelChunk | None, batch: Any) -> tuple[Any, Tensor | None]:
    """The chunk state of a batch, and the tensor that its first place works on, as a leaf of our own."""
    if chunk is None:
        match batch if isinstance(batch, tuple) else (batch, {}):
            case (Tensor() as tensor, Mapping() as attributes):
                return state_without_model(attributes), tensor
        found = type(batch).__name__
        if isinstance(batch, tuple):
            found = f"({', '.join(type(value).__name__ for value in batch)})"
        raise BatchError(f"a batch of ChunkPlan.of is a tensor, or (tensor, dict for the chunk state); found {found}")
    if not isinstance(batch, Mapping):
        raise BatchError(f"a batch is a dict of model.forward's keyword arguments; found {type(batch).__name__}")
    chunk.begin_microbatch()
    state = chunk.new_state(batch)
    has_head = chunk.model.pre_process
    hidden, state.hidden_states = state.hidden_states, None
    if has_head and hidden is not None:
        raise BatchError("this chunk has a pre-process, which takes no hidden_states; give decoder_input, or tokens")
    given = state.decoder_input if has_head else hidden
    if given is None and not has_head:
        raise BatchError("this chunk has no pre-process: its batch needs hidden_states, the previous part's output")
    return state, given


def state_without_model(attributes: Mapping[str, Any]) -> Any:
    """The chunk state of a microbatch of layers that were joined without a model."""
    state: Any = ChunkState()
    for name, value in {**_NO_MODEL, **attributes}.items():
        setattr(state, name, value)
    return state


_NO_MODEL = dict.fromkeys(
    (
        *("attention_mask", "rotary_pos_emb", "rotary_pos_cos", "rotary_pos_sin", "packed_seq_params"),
        *("sequence_len_offset", "padding_mask", "extra_block_kwargs", "model"),
    )
)


def _text(place: ChunkPlace) -> str:
    return place.slot if place.layer is None else f"L{place.layer}.{place.slot}"
