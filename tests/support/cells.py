"""Hypothesis strategies for cells: random configurations and shapes that the plain model can run in this process."""

from __future__ import annotations

from hypothesis import strategies as st

from layernodes.testing import megatron_configs
from tests.support.configs import CELLS, Cell

_FROZEN = ("embedding", "router", r"mlp\.experts", "self_attention", "layernorm", "output_layer", r"layers\.0\.")


def is_ordered(cell: Cell) -> bool:
    """Whether results depend on the order of forwards by design: random numbers, or sums over a global batch."""
    draws = ("hidden_dropout", "attention_dropout", "moe_input_jitter_eps", "moe_router_force_load_balancing")
    drawn = any(cell.config.get(name) for name in draws)
    kinds = cell.config.get("moe_router_load_balancing_type")
    return bool(drawn) or kinds == "global_aux_loss"


def device_cells() -> list[Cell]:
    """The cells of one process that run on any device, and whose results no order of microbatches changes.

    Not those over the emulated ``flex`` backends, which are the CPU suite's own.
    """
    return [
        cell
        for cell in CELLS
        if cell.world_size == 1
        and not is_ordered(cell)
        and "expert-bias-padding" not in cell.name
        and cell.config.get("moe_token_dispatcher_type") != "flex"
    ]


@st.composite
def cells(draw: st.DrawFn, *, max_microbatches: int = 4, dropout: bool = False) -> Cell:
    """1 to 4 layers, dense, MoE or mixed, with or without MTP; features at random."""
    layers = draw(st.text("MD", min_size=1, max_size=4))
    mtp = draw(st.sampled_from([0, 0, 0, 1, 2])) if len(layers) < 4 else 0
    pre_process = draw(st.integers(0, 4)) > 0
    post_process = bool(mtp) or draw(st.integers(0, 4)) > 0
    tied = draw(st.booleans()) if pre_process and post_process else False
    labels = draw(st.integers(0, 4)) > 0
    config = draw(megatron_configs(moe="M" in layers, dropout=dropout))
    recompute = config.get("recompute_modules", [])
    # A recomputed module of a layer that is used twice delivers its gradients twice a microbatch, in the plain model
    # too: the plain gradient of a microbatch, added as one, is then not what the plain model does with gradients there.
    if mtp == 2 and not {"layernorm", "shared_experts"} & set(recompute) and draw(st.booleans()):
        config["mtp_use_repeated_layer"] = True
    # Megatron-Core's recompute needs inputs that require grad.
    frozen = draw(st.lists(st.sampled_from(_FROZEN), unique=True, max_size=2)) if not recompute else []
    return Cell(
        name="drawn",
        layers=layers,
        mtp=mtp,
        pre_process=pre_process,
        post_process=post_process,
        tied=tied,
        labels=labels,
        local_experts=draw(st.sampled_from([1, 2, 4])) if config.get("moe_router_topk", 2) == 1 else 4,
        config=config,
        frozen=tuple(frozen),
        padding=draw(st.booleans()),
        loss_mask=draw(st.booleans()) and post_process,
        final_norm=draw(st.integers(0, 4)) > 0,
        uneven=draw(st.booleans()),
        position=draw(st.sampled_from(["rope", "learned_absolute", "none"])),
        seq=draw(st.integers(2, 6)),
        batch=draw(st.integers(1, 2)),
        vocab=32,
        num_microbatches=draw(st.integers(1, max_microbatches)),
        seed=draw(st.integers(1, 999)),
    )
