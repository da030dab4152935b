"""Measures what each step of a chunk costs on this machine, by running it.

Contract: what comes back predicts runs on the same machine, and is the same on all ranks that agree on it::

    warmup times, not counted, then repetitions times:
        run one microbatch under the serial schedule, W last    nothing overlaps: a step lasts until the next begins
        run three under combined_1f1b                           computation beside communication: the slow-down
    over the ranks, step by step and repetition by repetition:
        computation     the longest time of any rank: the others wait for it in their next exchange
        communication   the shortest time of any rank: whoever arrives last does not wait, and measures the link alone
    over the repetitions: medians, and the spread around them

The slow-downs come from the definition in ``simulate``: computation that takes ``d`` seconds alone, and ``t`` seconds
while communication runs for ``o`` of them, has ``t = d + o (1 - 1 / s)``; so has communication beside computation.
Where next to nothing overlaps they are 1. Of all ranks the greatest counts for computation, the least for
communication, whose time on the others is waiting too.

After that, one microbatch runs once more, in the calling thread, for the bytes that each step leaves behind
(``held_bytes``); of all ranks, the most count.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from statistics import median
from types import TracebackType
from typing import Any, Final, Self, final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from layernodes._megatron.kept import kept_state
from layernodes.errors import OptionError
from layernodes.plan import schedules
from layernodes.plan.arguments import check_argument
from layernodes.plan.chunk_plan import ChunkPlan
from layernodes.plan.costs import CostModel
from layernodes.plan.held_bytes import measure_held_bytes
from layernodes.plan.measured import costs_of_timelines
from layernodes.plan.program import Op
from layernodes.plan.ranks import side_group
from layernodes.plan.runner import Runner
from layernodes.plan.schedule import Schedule
from layernodes.plan.step import Step
from layernodes.plan.stream_kind import StreamKind
from layernodes.plan.timeline import Interval, Timeline
from layernodes.plan.wgrad import WgradPlace
from layernodes.slots import StreamType
from layernodes.streams import Streams

_OVERLAPPED: Final = 3
"""Microbatches that overlap; the least with two turns in which forward and backward run side by side."""
_HIGHEST_SHARE: Final = 0.9
"""A stream that stands still beside the other would be slowed down without end; more than tenfold is noise."""
_LEAST_OVERLAP: Final = 0.1
"""The share of computation that must run beside communication for a slow-down to show above the noise."""


def profile(
    chunk: ChunkPlan,
    batch: Any,
    *,
    loss_grad: Any = None,
    repetitions: int = 10,
    warmup: int = 2,
    streams: StreamKind | str | Streams[Op] = StreamKind.AUTO,
    group: ProcessGroup | None = None,
    name: str = "profile",
) -> CostModel:
    """Measure what the steps of a chunk cost: seconds of F, B and W of every slot of every layer and of the chunk's
    ends, and the bytes that F keeps for B, and B for W.

    All ranks of ``group`` call it, with the same arguments but for the batch, and get the same costs. The model is left
    as it was: gradients, buffers and random generators are put back. It must not be wrapped in DDP, whose hooks would
    take the gradients for those of a training step; Megatron-Core's log of auxiliary losses counts the runs.

    Args:
        chunk: the chunk; slots whose weight gradients it defers have a ``W``, the others have them in their ``B``.
        batch: one microbatch, as ``ChunkPlan.open`` takes it, of the size that is trained with.
        loss_grad: gradient of its output; None: ones.
        repetitions: runs that count, 1 or more.
        warmup: runs before them that do not.
        streams: as of ``Runner``; those that will be trained with.
        group: the ranks that agree; None: those with which the chunk exchanges tokens.
        name: what to call the costs.

    Returns:
        Costs by layer, and for each kind of layer their medians, so that they serve deeper models too; the seconds are
        those of the slowest rank. ``measurement`` has the spread. On thread streams a communication step lasts until
        its collective is over, as long as the link takes; ranks that compute at uneven speed wait for each other
        besides, and that is not in it.

    Raises:
        OptionError: fewer than 1 repetition, or negative warm-up.
        CostError: the chunk has no slots.
        StepError: a step raised.
    """
    check_argument("chunk", chunk, ChunkPlan)
    if repetitions < 1 or warmup < 0:
        raise OptionError(
            f"repetitions={repetitions}, warmup={warmup}; give 1 repetition or more, and a warm-up of 0 or more"
        )
    with kept_state(chunk.modules), Runner(streams) as runner, _Peers(group, chunk) as peers:
        measured = list(_measure(chunk, batch, loss_grad, runner, peers, warmup + repetitions))[warmup:]
        runs = [run for run, _ in measured]
        overlapped = [other for _, other in measured if other is not None]
        compute_slowdown = peers.largest(_tensor(_slowdown(runs, overlapped, StreamType.COMPUTE))).item()
        comm_slowdown = -peers.largest(_tensor(-_slowdown(runs, overlapped, StreamType.COMM))).item()
        held_bytes = _held_bytes(chunk, batch, loss_grad, peers)
        costs = costs_of_timelines(_agree(runs, peers), chunk.shape, held_bytes=held_bytes, name=name)
    assert costs.measurement is not None
    streams_name = str(streams) if isinstance(streams, str) else type(streams).__name__
    return costs.model_copy(
        update={
            "compute_slowdown": compute_slowdown,
            "communication_slowdown": comm_slowdown,
            "measurement": costs.measurement.model_copy(
                update={"warmup": warmup, "num_ranks": peers.num_ranks, "streams": streams_name}
            ),
        }
    )


def _measure(
    chunk: ChunkPlan, batch: Any, loss_grad: Any, runner: Runner, peers: _Peers, count: int
) -> Iterator[tuple[Timeline, Timeline | None]]:
    """One microbatch alone, and some that overlap; None where the chunk has no communication."""
    alone = _alone(chunk)
    beside = schedules.combined_1f1b(chunk.shape, _OVERLAPPED)
    overlaps = any(slot.stream is StreamType.COMM and not slot.passthrough for _, slot in chunk.shape.places())
    for _ in range(count):
        peers.meet()
        run = runner.run(alone, chunk, [batch], [loss_grad]).timeline
        other = None
        if overlaps:
            peers.meet()
            other = runner.run(beside, chunk, [batch] * _OVERLAPPED, [loss_grad] * _OVERLAPPED).timeline
        yield run, other


def _alone(chunk: ChunkPlan) -> Schedule:
    alone = schedules.serial(chunk.shape, 1)
    if any(chunk.shape.wgrad_slots):
        alone = schedules.deferred(alone, chunk.shape, WgradPlace.END)
    return alone


def _held_bytes(chunk: ChunkPlan, batch: Any, loss_grad: Any, peers: _Peers) -> dict[Step, int]:
    """The bytes that each step leaves behind, on the rank where they are most."""
    mine = measure_held_bytes(chunk, _alone(chunk), batch, loss_grad)
    most = peers.largest(torch.tensor([*mine.values()], dtype=torch.int64)).tolist()
    return dict(zip(mine, most, strict=True))


def _agree(runs: Sequence[Timeline], peers: _Peers) -> list[Timeline]:
    """Every repetition with the durations that count over all ranks: longest computation, shortest communication."""
    signs = torch.tensor([-1.0 if i.stream is StreamType.COMM else 1.0 for i in runs[0].intervals], dtype=torch.float64)
    mine = torch.tensor([_until_the_next(run) for run in runs], dtype=torch.float64)
    agreed = (peers.largest(mine * signs) * signs).tolist()  # the largest of negative times is the shortest
    return [
        Timeline(tuple(Interval(i.step, i.stream, 0.0, d) for i, d in zip(run.intervals, durations, strict=True)))
        for run, durations in zip(runs, agreed, strict=True)
    ]


def _until_the_next(run: Timeline) -> list[float]:
    """Seconds from each step's begin to the next one's: handing over to the other stream is a cost too."""
    starts = [interval.start for interval in run.intervals]
    ends = [*starts[1:], *(interval.end for interval in run.intervals[-1:])]
    return [end - start for start, end in zip(starts, ends, strict=True)]


def _slowdown(alone: Sequence[Timeline], overlapped: Sequence[Timeline], stream: StreamType) -> float:
    """How many times longer a stream's steps take beside the other's; 1 where too little ran at the same time."""
    compute_alone, own_alone = (
        _OVERLAPPED * median(run.busy(one) for run in alone) for one in (StreamType.COMPUTE, stream)
    )
    shares = []
    for run in overlapped:
        both = run.busy(StreamType.COMM) - run.exposed_communication
        if both > _LEAST_OVERLAP * compute_alone:
            shares.append((run.busy(stream) - own_alone) / both)
    share = median(shares or [0.0])
    return 1.0 / (1.0 - min(max(share, 0.0), _HIGHEST_SHARE))


def _tensor(value: float) -> Tensor:
    return torch.tensor([value], dtype=torch.float64)


@final
class _Peers:
    """The ranks that agree on costs, over CPU groups of their own; a rank alone agrees with itself."""

    def __init__(self, group: ProcessGroup | None, chunk: ChunkPlan) -> None:
        groups: Iterable[ProcessGroup] = chunk.exchange_groups if group is None else [group]
        by_ranks = {tuple(dist.get_process_group_ranks(one)): one for one in groups}
        self._mains = {members: one for members, one in by_ranks.items() if len(members) > 1}
        self._groups: list[Any] = []

    def __enter__(self) -> Self:
        self._groups = [side_group(main) for main in self._mains.values()]
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        while self._groups:
            dist.destroy_process_group(self._groups.pop())

    @property
    def num_ranks(self) -> int:
        """How many ranks agree."""
        return len({rank for members in self._mains for rank in members}) or 1

    def meet(self) -> None:
        """Return when all ranks have called it, so that they begin together."""
        for group in self._groups:
            dist.barrier(group=group)

    def largest(self, values: Tensor) -> Tensor:
        """The largest of all ranks' values, element by element."""
        for group in self._groups:
            dist.all_reduce(values, op=dist.ReduceOp.MAX, group=group)
        return values
