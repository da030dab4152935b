"""The accelerator stream that a slot runs on, for the allocator."""

from __future__ import annotations

import torch
from torch import Tensor

from layernodes.lane import DeviceLane


def current_device_stream(tensor: Tensor) -> torch.Stream | None:
    """The current stream of the tensor's device; None for a tensor on the CPU, where nothing runs behind our back."""
    return torch.cuda.current_stream(tensor.device) if tensor.is_cuda else None


def current_lane(tensor: Tensor) -> DeviceLane | None:
    """The lane of that stream; None on the CPU."""
    stream = current_device_stream(tensor)
    return None if stream is None else DeviceLane(stream)
