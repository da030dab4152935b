"""The random generators that a step may draw from: torch's own, and those of Megatron-Core's tracker."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import final

import torch
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from torch import Tensor


@final
class Generators:
    """Reads and sets the state of every generator, by name.

    Names are ``cpu``, ``device`` (the current accelerator's, where there is one that Megatron-Core draws from) and
    ``tracker.NAME`` for each state of Megatron-Core's tracker.
    """

    def __init__(self) -> None:
        # On the CPU host the device's generator is the CPU's.
        self._has_device = torch.cuda.is_available()

    def states(self) -> dict[str, Tensor]:
        """The state of each, as byte tensors."""
        states = {"cpu": torch.get_rng_state()}
        if self._has_device:
            states["device"] = torch.cuda.get_rng_state()
        tracker = get_cuda_rng_tracker()
        if tracker.is_initialized():
            states |= {f"tracker.{name}": _bytes(state) for name, state in tracker.get_states().items()}
        return states

    def seed(self, seed_of: Callable[[str], int]) -> None:
        """Put each generator into the state that follows from the seed of its name."""
        torch.set_rng_state(_cpu_state(seed_of("cpu")))
        if self._has_device:
            torch.cuda.set_rng_state(_device_state(seed_of("device")))
        tracker = get_cuda_rng_tracker()
        if tracker.is_initialized():
            make = _device_state if self._has_device else _cpu_state
            states = tracker.get_states()
            tracker.set_states({name: _put(state, make(seed_of(f"tracker.{name}"))) for name, state in states.items()})

    def restore(self, states: Mapping[str, Tensor]) -> None:
        """Put each generator back into the state that ``states()`` found it in."""
        torch.set_rng_state(states["cpu"])
        if self._has_device:
            torch.cuda.set_rng_state(states["device"])
        tracker = get_cuda_rng_tracker()
        if tracker.is_initialized():
            found = tracker.get_states()
            tracker.set_states({name: _put(state, states[f"tracker.{name}"]) for name, state in found.items()})


def _cpu_state(seed: int) -> Tensor:
    return torch.Generator().manual_seed(seed).get_state()


def _device_state(seed: int) -> Tensor:
    return torch.Generator(device="cuda").manual_seed(seed).get_state()


def _put(state: Tensor | torch.Generator, new: Tensor) -> Tensor | torch.Generator:
    """What the tracker is to hold in place of ``state``: the same generator, which CUDA graphs know, or new bytes."""
    if not isinstance(state, torch.Generator):
        return new
    state.set_state(new)
    return state


def _bytes(state: Tensor | torch.Generator) -> Tensor:
    return state.get_state() if isinstance(state, torch.Generator) else state
