"""The streams that a runner can be asked for by name."""

from __future__ import annotations

from enum import StrEnum
from typing import NoReturn

from layernodes.device_streams import DeviceStreams
from layernodes.lane import accelerator_with_streams
from layernodes.plan.arguments import refuse_option
from layernodes.plan.program import Op
from layernodes.plan.recording import RecordingStreams
from layernodes.streams import InlineStreams, Streams, ThreadStreams


class StreamKind(StrEnum):
    """Which streams a runner uses; ``auto``: the accelerator's where there is one, else threads."""

    AUTO = "auto"
    CUDA = "cuda"
    THREADS = "threads"
    INLINE = "inline"
    RECORDING = "recording"

    @classmethod
    def _missing_(cls, value: object) -> NoReturn:
        refuse_option("streams", value, cls)


def make_streams(kind: StreamKind) -> Streams[Op]:
    """New streams of a kind.

    Raises:
        NodeStateError: ``cuda`` without an accelerator.
    """
    if kind is StreamKind.INLINE:
        return InlineStreams()
    if kind is StreamKind.RECORDING:
        return RecordingStreams()
    if kind is StreamKind.THREADS:
        return ThreadStreams()
    if kind is StreamKind.CUDA or accelerator_with_streams() is not None:
        return DeviceStreams()
    return ThreadStreams()
