"""The page of supported configurations: a table of totals, and one for each subject, a row a configuration."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from tests.support.compare import Status
from tests.support.configs import Cell

WORDS: Mapping[Status, str] = {
    "right": "equal",
    "rounding": "rounding",
    "wrong": "**wrong**",
    "crash": "crash",
    "refused": "refused",
    "unrunnable": "plain fails",
}
"""How the page spells a status."""


@dataclass(kw_only=True)
class Row:
    """One configuration: at each expert-parallel size, what came of it.

    Attributes:
        subject: title of the table that it belongs to.
        name, settings: its name and what it sets, in words.
        ours, megatron: statuses by expert-parallel size.
        causes: what Megatron-Core's own plan raised.
    """

    subject: str
    name: str
    settings: str
    ours: dict[int, Status] = field(default_factory=dict)
    megatron: dict[int, Status] = field(default_factory=dict)
    causes: list[str] = field(default_factory=list)


def _has(*names: str) -> Callable[[Cell], bool]:
    return lambda cell: any(name in {**cell.config, **cell.late_config} for name in names)


_SUBJECTS: Sequence[tuple[str, Callable[[Cell], bool]]] = (
    ("Tensor parallel: two ranks share a layer", lambda cell: cell.tp > 1),
    (
        "`flex` dispatcher, over stand-ins of DeepEP and HybridEP",
        lambda cell: cell.config.get("moe_token_dispatcher_type") == "flex",
    ),
    ("Dense layers", lambda cell: "M" not in cell.layers),
    ("MoE layers, `alltoall` dispatcher", lambda cell: cell.name.startswith("alltoall")),
    ("MoE layers, `allgather` dispatcher", lambda cell: cell.config.get("moe_token_dispatcher_type") == "allgather"),
    ("Multi-token prediction", lambda cell: cell.mtp > 0),
    ("Two microbatches at once in each layer", lambda cell: cell.orders == ("paired",)),
    ("Frozen parameters", lambda cell: bool(cell.frozen)),
    ("Pipeline chunks", lambda cell: not (cell.pre_process and cell.post_process)),
    ("Attention, positions, packed sequences", lambda cell: cell.core_attention == "own" or cell.position != "rope"),
    ("Attention, positions, packed sequences", _has("num_query_groups", "qk_layernorm", "add_qkv_bias")),
    ("Recompute", _has("recompute_granularity")),
    ("Megatron-Core's options for its own plan", lambda cell: bool(cell.late_config)),
    (
        "Routing, losses, dropped tokens",
        lambda cell: (
            cell.padding
            or cell.idle_rank
            or any(name.startswith(("moe_router", "moe_z_loss", "moe_expert_capacity")) for name in cell.config)
        ),
    ),
    ("Experts, layers, numbers", lambda cell: True),
)
"""Titles of the tables, and what belongs to each; the first that fits has it."""

_NONE = "-"
"""What a table has where there is no such configuration."""

_HEAD = """\
# Supported configurations

Made by `tests/support/configurations.py` from what the tests ran; not written by hand.

{count} configurations, each a small model, run plainly and through the schedule plan: as Megatron-Core has it, and on
layernodes' nodes (`install()`). Each runs serially and with a forward beside the backward before it, or, where that is
said, all forwards and then all backwards, slot by slot. Compared are outputs, gradients of parameters and inputs,
buffers, generators' states and logged losses. On CPUs with gloo ({ran}); the two `flex` backends are
stand-ins with the same interface.

| | |
|---|---|
| equal | bit for bit the plain model's |
| rounding | not equal, and within the dtype's rounding |
| **wrong** | other numbers, and no error |
| crash | an error in the midst of a run |
| refused | an error before anything runs, which says why |
| plain fails | the plain model itself does not run |
| - | not in the matrix |

Expert-parallel size 1 (EP=1) and the `allgather` dispatcher are outside of what Megatron-Core's own validation admits
for its plan. What is not in the tables is refused by name (`UnsupportedLayerError`), or was not tried. Hybrid models
have [their own page](hybrid.md), and GPUs [theirs](gpu.md). Under a `Runner` random configurations and schedules are
compared, and every configuration of two ranks: [Measurements](measurements.md).

## In all
"""

_IMPLIED = {
    *("recompute_granularity", "moe_router_pre_softmax", "moe_aux_loss_coeff", "moe_pad_expert_input_to_capacity"),
    *("kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim", "rotary_scaling_factor", "params_dtype"),
    *("overlap_moe_expert_parallel_comm", "attention_dropout", "moe_token_dispatcher_type"),
    "moe_flex_dispatcher_backend",
}
"""Options that another one of the same configuration brings with it, or that its name says."""

_SHORT = {"hidden_dropout": "dropout", "moe_shared_expert_intermediate_size": "shared expert", "bf16": "bf16"}
"""Options that have a plainer word."""

_DEFAULTS = {f.name: f.default for f in fields(Cell)}


def rows_of(found: Iterable[tuple[Cell, Status, Status, str]]) -> list[Row]:
    """The rows, in the matrix's order; cells that differ in expert-parallel size alone are one."""
    rows: dict[str, Row] = {}
    for cell, ours, megatron, cause in found:
        name = re.sub(r"-ep\d(-etp\d)?", "", cell.name)
        row = rows.setdefault(name, Row(subject=_subject(cell), name=name, settings=_settings(cell)))
        row.ours[cell.ep], row.megatron[cell.ep] = ours, megatron
        row.causes += [cause] if cause else []
    return list(rows.values())


def totals(rows: Iterable[Row]) -> tuple[Counter[Status], Counter[Status]]:
    """How many configurations have each status: ours, and Megatron-Core's own."""
    known = list(rows)
    return (
        Counter(status for row in known for status in row.ours.values()),
        Counter(status for row in known for status in row.megatron.values()),
    )


def page(rows: Sequence[Row], versions: Mapping[str, str]) -> str:
    """The page's text."""
    tables: dict[str, list[Row]] = {}
    for row in rows:
        tables.setdefault(row.subject, []).append(row)
    lines = [*_head(sum(len(row.ours) for row in rows), versions), "", *_total_table(tables), *_causes(rows)]
    for title, members in tables.items():
        lines += ["", f"## {title}", "", *_table(members)]
    return "\n".join(lines) + "\n"


def _head(count: int, versions: Mapping[str, str]) -> list[str]:
    ran = ", ".join(f"{name} {number}" for name, number in versions.items())
    return _HEAD.format(count=count, ran=ran).splitlines()


def _total_table(tables: Mapping[str, Sequence[Row]]) -> list[str]:
    shown: list[Status] = ["right", "rounding", "wrong", "crash", "unrunnable"]
    head = ["", "runs", "layernodes: equal", *(f"Megatron-Core: {WORDS[status].strip('*')}" for status in shown[:-1])]
    lines = [_line(head), _line(["---"] * len(head))]
    everything = [row for members in tables.values() for row in members]
    for title, members in [*tables.items(), ("**all**", everything)]:
        ours, megatron = totals(members)
        cells = [sum(ours.values()), ours["right"], *(megatron[status] for status in shown[:-1])]
        lines.append(_line([title, *map(str, cells)]))
    return [*lines, "", f"In the other {totals(everything)[0]['unrunnable']} the plain model itself fails."]


def _causes(rows: Iterable[Row]) -> list[str]:
    """The commonest errors of Megatron-Core's own plan."""
    counts = Counter(_shortened(cause) for row in rows for cause in row.causes)
    lines = [
        "",
        "What the crashes of Megatron-Core's own plan say (`setStorage`: a tensor whose storage was freed too early):",
        "",
        "| error | runs |",
        "|---|---|",
    ]
    shown = counts.most_common(6)
    lines += [_line([f"`{cause}`", str(count)]) for cause, count in shown]
    others = counts.total() - sum(count for _, count in shown)
    return [*lines, _line(["others", str(others)])] if others else lines


def _shortened(cause: str) -> str:
    cause = re.sub(r"\[[^]]*\]|\b\d+\b", "N", cause).replace("|", "/").replace("`", "'")
    return cause if len(cause) <= 160 else cause[:157] + "..."


def _table(rows: Iterable[Row]) -> list[str]:
    head = ["configuration", "what it sets", "layernodes EP=1", "EP=2", "Megatron-Core EP=1", "EP=2"]
    lines = [_line(head), _line(["---"] * len(head))]
    for row in rows:
        found = [WORDS[of[ep]] if ep in of else _NONE for of in (row.ours, row.megatron) for ep in (1, 2)]
        lines.append(_line([row.name, row.settings, *found]))
    return lines


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _subject(cell: Cell) -> str:
    return next(title for title, fits in _SUBJECTS if fits(cell))


def _settings(cell: Cell) -> str:
    """What differs from a GPT of two MoE layers with two experts a rank."""
    found = [_spelling(name, value) for name, value in {**cell.config, **cell.late_config}.items()]
    words = [*_words(cell), *(text for text in found if text)]
    return ", ".join(words) or "nothing"


def _words(cell: Cell) -> list[str]:
    kinds = {"M": "MoE", "D": "dense"}
    said = {
        "layers": f"layers: {', '.join(kinds[letter] for letter in cell.layers)}",
        "local_experts": f"{cell.local_experts} expert{'s' * (cell.local_experts > 1)} a rank",
        "mtp": f"{cell.mtp} MTP layer{'s' * (cell.mtp > 1)}",
        "tied": "tied embeddings",
        "final_norm": "no final norm",
        "pre_process": "no embedding",
        "post_process": "no output layer",
        "frozen": "frozen: " + ", ".join(f"`{pattern}`" for pattern in cell.frozen),
        "position": f"position `{cell.position}`",
        "idle_rank": "every token goes to one rank",
        "padding": "padding mask",
        "labels": "logits, no labels",
        "loss_mask": "loss mask",
        "packed": f"packed sequences of {', '.join(map(str, cell.packed))}",
        "tokens_per_sample": f"`tokens_per_sample={cell.tokens_per_sample}`",
        "core_attention": "attention of the tests' own",
        "seq": f"sequences of {cell.seq}",
        "batch": f"batch of {cell.batch}",
        "uneven": "another length each microbatch",
        "orders": "all forwards, then all backwards",
        "num_microbatches": f"{cell.num_microbatches} microbatches",
    }
    hidden: set[str] = {"num_microbatches"} if cell.orders == ("paired",) else set()
    if cell.packed:
        hidden |= {"seq", "batch", "core_attention"}
    return [text for name, text in said.items() if name not in hidden and getattr(cell, name) != _DEFAULTS[name]]


def _spelling(name: str, value: Any) -> str:
    """An option as one sets it; nothing where it is the subject's, or comes with another one."""
    if name in _SHORT:
        return _SHORT[name]
    if name in _IMPLIED or value is False or (name == "q_lora_rank" and value is not None):
        return ""
    if isinstance(value, list):
        return f"`{name}=[{', '.join(str(one) for one in value)}]`"
    return f"`{name}`" if value is True else f"`{name}={value}`"
