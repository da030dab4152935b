"""The demonstration's report: data that dumps to JSON, and its text for a terminal."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence

from pydantic import BaseModel, ConfigDict

from layernodes.demo.compare import Difference
from layernodes.demo.settings import BATCH_SIZE, NUM_HEADS, SEQUENCE_LENGTH, DemoSettings
from layernodes.demo.timing import SlotCall
from layernodes.plan.layer_plan import LayerPlan
from layernodes.slots import MEGATRON_SLOTS, Phase, Slot


class _Data(BaseModel):
    model_config = ConfigDict(frozen=True)


class SlotTimes(_Data):
    """One slot over all layers of one kind and all microbatches; ``forward`` and ``backward`` are medians in seconds,
    ``calls`` the number of calls of each."""

    layers: str
    slot: str
    stream: str
    node: str
    forward: float
    backward: float
    calls: int


class MicrobatchLoss(_Data):
    """Mean loss of a microbatch over its tokens and all ranks."""

    microbatch: int
    plain: float
    nodes: float


class Verdict(_Data):
    """Whether everything compared was bit for bit equal, on every rank.

    Attributes:
        equal: the verdict.
        outputs, gradients: number of tensors compared on each rank.
        difference: the first that was not; None where ``equal``.
    """

    equal: bool
    outputs: int
    gradients: int
    difference: Difference | None


class DemoReport(_Data):
    """Everything that ``layernodes demo --json`` prints.

    Attributes:
        text_name, text_bytes: the text. layer_kinds: kind of each layer, in order.
        num_parameters: of this rank. num_ranks, device, backend: where it ran.
        slots, losses, verdict: see there.
        seconds_plain, seconds_nodes: wall time of each pass.
    """

    settings: DemoSettings
    text_name: str
    text_bytes: int
    layer_kinds: tuple[str, ...]
    num_parameters: int
    num_ranks: int
    device: str
    backend: str
    slots: tuple[SlotTimes, ...]
    losses: tuple[MicrobatchLoss, ...]
    verdict: Verdict
    seconds_plain: float
    seconds_nodes: float


def kind_of_layer(plan: LayerPlan) -> str:
    """``MTP``, ``MoE`` or ``dense``."""
    if Slot.MTP_POST_PROCESS in plan.nodes:
        return "MTP"
    return "MoE" if plan.is_moe else "dense"


def summarize(calls: Iterable[SlotCall], layers: Sequence[LayerPlan]) -> tuple[SlotTimes, ...]:
    """Medians by kind of layer and slot, kinds in order of their first layer."""
    seconds: defaultdict[tuple[str, Slot, Phase], list[float]] = defaultdict(list)
    for (_, layer, slot, phase), start, end in calls:
        seconds[kind_of_layer(layers[layer]), slot, phase].append(end - start)
    first_of_kind: dict[str, LayerPlan] = {}
    for plan in layers:
        first_of_kind.setdefault(kind_of_layer(plan), plan)
    return tuple(
        SlotTimes(
            layers=kind,
            slot=slot.value,
            stream=node.stream.value,
            node=type(node).__name__,
            forward=statistics.median(seconds[kind, slot, Phase.F]),
            backward=statistics.median(seconds[kind, slot, Phase.B]),
            calls=len(seconds[kind, slot, Phase.F]),
        )
        for kind, plan in first_of_kind.items()
        for slot, node in plan.nodes.items()
        if slot in MEGATRON_SLOTS
    )


def render(report: DemoReport) -> str:
    """The report for a terminal, at most 100 columns wide."""
    return "\n\n".join(
        "\n".join(lines)
        for lines in (
            _render_head(report),
            _render_slots(report),
            _render_losses(report),
            render_verdict(report.verdict, num_ranks=report.num_ranks),
        )
    )


def _render_head(report: DemoReport) -> list[str]:
    s = report.settings
    experts = f"{s.experts // report.num_ranks} of {_count(s.experts, 'expert')} on each"
    return [
        "layernodes demo: one Megatron-Core model, run plainly and through the nodes",
        "",
        f"model     {_count_kinds(report.layer_kinds)}",
        f"          hidden {s.hidden}, {NUM_HEADS} heads, top-{s.topk} of {_count(s.experts, 'expert')}, "
        f"{report.num_parameters:,} parameters a rank",
        f"text      {report.text_name}, {report.text_bytes:,} bytes, one token each; "
        f"{_count(s.microbatches, 'microbatch', 'es')} of {BATCH_SIZE} x {SEQUENCE_LENGTH} tokens",
        f"ranks     {report.num_ranks} on {report.device} ({report.backend}), {experts}",
        f"schedule  Megatron-Core's combined 1F1B: {_schedule_text(s.microbatches)}",
    ]


def _count(number: int, noun: str, plural: str = "s") -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}{plural}"


def _count_kinds(kinds: Sequence[str]) -> str:
    return " + ".join(_count(kinds.count(kind), f"{kind} layer") for kind in dict.fromkeys(kinds))


def _schedule_text(num_microbatches: int) -> str:
    """The combined steps, shortened in the middle."""
    steps = ["F0", *(f"F{i}+B{i - 1}" for i in range(1, num_microbatches)), f"B{num_microbatches - 1}"]
    return "  ".join(steps if len(steps) <= 8 else [*steps[:4], "...", *steps[-2:]])


def _render_slots(report: DemoReport) -> list[str]:
    rows = [("layers", "slot", "stream", "node", "calls", "forward", "backward")]
    rows += [
        (s.layers, s.slot, s.stream, s.node, str(s.calls), f"{s.forward * 1e3:.3f} ms", f"{s.backward * 1e3:.3f} ms")
        for s in report.slots
    ]
    on_gpu = report.device.startswith("cuda")
    note = "" if on_gpu else "; the two streams take turns on a CPU, which hides nothing"
    return [*_table(rows, right=(4, 5, 6)), f"(median time of a call{note})"]


def _render_losses(report: DemoReport) -> list[str]:
    rows = [("microbatch", "loss, plain", "loss, nodes")]
    rows += [(str(loss.microbatch), f"{loss.plain:.9f}", f"{loss.nodes:.9f}") for loss in report.losses]
    return _table(rows, right=(0, 1, 2))


def render_verdict(verdict: Verdict, *, num_ranks: int) -> list[str]:
    """The verdict in lines."""
    compared = (
        f"{_count(verdict.outputs + verdict.gradients, 'tensor')} compared "
        f"({_count(verdict.outputs, 'output')}, {_count(verdict.gradients, 'parameter gradient')})"
    ) + (f" on each of {num_ranks} ranks" if num_ranks > 1 else "")
    if verdict.difference is None:
        return [f"bitwise equal: {compared}"]
    found = verdict.difference
    lines = [f"NOT EQUAL: {compared}", f"  first differing tensor  {found.tensor}"]
    lines.append(f"  shape                   {found.shape}, on rank {found.rank}")
    if found.index is not None:
        lines.append(f"  largest difference      {found.max_abs_difference:.6g}")
        lines.append(f"  first element           {found.index}: plain {found.plain!r}, nodes {found.nodes!r}")
    return [*lines, f"  note                    {found.note}"] if found.note else lines


def _table(rows: Sequence[Sequence[str]], *, right: Sequence[int]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    rule = ["-" * width for width in widths]
    return [
        "  ".join(
            cell.rjust(width) if i in right else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in (rows[0], rule, *rows[1:])
    ]
