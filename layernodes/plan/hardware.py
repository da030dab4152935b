"""Rates of published hardware, for the costs of published models."""

from __future__ import annotations

from typing import Annotated, Final, final

from pydantic import Field

from layernodes.plan.strict_model import NUMBER, StrictModel

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False), NUMBER]


@final
class Hardware(StrictModel):
    """Rates of one GPU and its links.

    Attributes:
        name: what it is.
        source: where the rates come from.
        peak_flops: dense bfloat16 FLOP/s.
        efficiency: share of the peak that matrix multiplications reach.
        memory_bandwidth: bytes a second that elementwise work reaches.
        node_size: GPUs joined by the fast link.
        node_bandwidth: bytes a second that one GPU's all-to-all reaches within a node.
        network_bandwidth: the same between nodes.
        latency: seconds that every all-to-all takes at least.
    """

    name: str
    source: str
    peak_flops: Positive
    efficiency: Positive
    memory_bandwidth: Positive
    node_size: Annotated[int, Field(ge=1)]
    node_bandwidth: Positive
    network_bandwidth: Positive
    latency: Positive


H100: Final = Hardware(
    name="H100 SXM, 8 a node, InfiniBand NDR",
    source=(
        "NVIDIA H100 data sheet (989.4 TFLOP/s dense BF16, 3.35 TB/s HBM3, NVLink 450 GB/s a direction), ConnectX-7 "
        "400 Gb/s a GPU; all-to-all rates measured by DeepEP's README: about 155 GB/s within a node, 43 to 51 GB/s "
        "between nodes. Assumed: 55 % of peak, 80 % of memory bandwidth, 30 us an all-to-all"
    ),
    peak_flops=989.4e12,
    efficiency=0.55,
    memory_bandwidth=0.8 * 3.35e12,
    node_size=8,
    node_bandwidth=155e9,
    network_bandwidth=46e9,
    latency=30e-6,
)
