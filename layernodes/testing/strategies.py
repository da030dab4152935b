"""Hypothesis strategies: shapes, schedules that are valid and that are not, costs, Megatron-Core configurations."""

from __future__ import annotations

import random
from typing import Any, Final, NamedTuple

import torch

from layernodes.errors import MissingExtraError
from layernodes.plan.costs import CostModel, SlotCost
from layernodes.plan.rules import Mode, Rules
from layernodes.plan.schedule import Schedule
from layernodes.plan.shape import ChunkShape
from layernodes.plan.step import Step
from layernodes.slots import ExtraSlot, Phase, Slot, StreamType
from layernodes.testing.orders import random_schedule

try:
    from hypothesis import strategies as st
except ModuleNotFoundError as error:
    if (error.name or "").partition(".")[0] != "hypothesis":
        raise
    raise MissingExtraError(
        "layernodes.testing needs hypothesis: pip install 'layernodes[testing]'", extra="testing"
    ) from None

_SEEDS: Final = st.integers(0, 2**32 - 1)


@st.composite
def extra_slots(draw: st.DrawFn) -> list[ExtraSlot]:
    """Slots of the user's own, after any slot, on either stream."""
    names = draw(st.lists(st.sampled_from(["gate", "norm_out", "probe"]), unique=True, max_size=2))
    slots = [slot for slot in Slot if slot is not Slot.POST_COMBINE]
    streams = st.sampled_from(StreamType)
    return [ExtraSlot(name, after=draw(st.sampled_from(slots)), stream=draw(streams)) for name in names]


@st.composite
def chunk_shapes(draw: st.DrawFn, *, min_layers: int = 0, max_layers: int = 4) -> ChunkShape:
    """Shapes of dense, MoE and MTP layers, with and without ends, deferral, split combine and extra slots.

    Args:
        min_layers, max_layers: how many layers, MTP layers included.
    """
    kinds = draw(st.lists(st.sampled_from(["moe", "dense"]), min_size=min_layers, max_size=max_layers))
    num_mtp = draw(st.integers(0, min(2, len(kinds))))
    own = draw(extra_slots()) if draw(st.booleans()) else []
    choices: list[bool | list[str]] = [False, True, ["mlp"]]
    wgrad = draw(st.sampled_from(choices))
    return ChunkShape.of(
        kinds[: len(kinds) - num_mtp],
        mtp=kinds[len(kinds) - num_mtp :],
        pre_process=draw(st.booleans()),
        post_process=draw(st.booleans()),
        wgrad=[*wgrad, *(slot.name for slot in own)] if isinstance(wgrad, list) else wgrad,
        split_combine=draw(st.booleans()),
        extra_slots=own,
    )


def valid_schedules(
    shape: ChunkShape, num_microbatches: int, mode: Mode | str = Mode.TRAIN
) -> st.SearchStrategy[Schedule]:
    """Any valid order of a shape, with up to ``num_microbatches`` microbatches in flight.

    Args:
        shape, num_microbatches: what the schedules are of.
        mode: ``"train"``, or ``"forward"`` for forward steps alone.
    """
    return _SEEDS.map(lambda seed: random_schedule(shape, num_microbatches, random.Random(seed), mode))


class BrokenSchedule(NamedTuple):
    """A schedule with one fault.

    Attributes:
        schedule: what ``validate`` must refuse.
        rule: the rule that it breaks: ``"missing"``, ``"duplicate"``, ``"order"`` or ``"foreign"``.
        step: text of a step that the error must name.
    """

    schedule: Schedule
    rule: str
    step: str


@st.composite
def invalid_schedules(
    draw: st.DrawFn, shape: ChunkShape, num_microbatches: int, mode: Mode | str = Mode.TRAIN
) -> BrokenSchedule:
    """A valid schedule with one step left out, doubled, put before what it depends on, or put into a foreign layer.

    Args:
        shape, num_microbatches, mode: as for ``valid_schedules``.
    """
    valid = draw(valid_schedules(shape, num_microbatches, mode))
    steps = list(valid.steps)
    rules = Rules.of(shape, num_microbatches, mode)
    required = [index for index, step in enumerate(steps) if not rules.optional[rules.ids[step]]]
    dependent = [(before[0], index) for index, before in enumerate(rules.dependencies(steps)) if before]
    kinds = ["foreign", *(["missing"] if required else []), *(["duplicate"] if steps else [])]
    rule = draw(st.sampled_from([*kinds, *(["order"] if dependent else [])]))
    if rule == "missing":
        step = steps.pop(draw(st.sampled_from(required)))
    elif rule == "duplicate":
        step = draw(st.sampled_from(steps))
        steps.insert(draw(st.integers(steps.index(step) + 1, len(steps))), step)
    elif rule == "order":
        first, second = draw(st.sampled_from(dependent))
        step = steps[second]
        steps[first], steps[second] = steps[second], steps[first]
    else:
        step = Step(Phase.F, 0, shape.num_layers + draw(st.integers(0, 9)), Slot.MLP.value)
        steps.insert(draw(st.integers(0, len(steps))), step)
    return BrokenSchedule(Schedule(steps), rule, str(step))


@st.composite
def cost_models(draw: st.DrawFn, shape: ChunkShape, *, highest: int = 9) -> CostModel:
    """Whole seconds and bytes for every slot of every layer of a shape, so that sums are exact; some are 0.

    Args:
        shape: the chunk's shape.
        highest: the largest number of seconds or bytes.
    """
    number = st.integers(0, highest)
    costs = st.builds(SlotCost, F=number, B=number, W=number, activation_bytes=number, wgrad_bytes=number)
    return CostModel(
        kinds={},
        layers={i: {slot.name: draw(costs) for slot in layer.slots} for i, layer in enumerate(shape.layers)},
        ends={name: draw(costs) for name in shape.ends},
        hardware_queues=draw(st.sampled_from([2, 2, 1])),
        compute_slowdown=draw(st.sampled_from([1.0, 1.0, 1.5])),
    )


def _one_in(draw: st.DrawFn, n: int) -> bool:
    return draw(st.integers(0, n - 1)) == n - 1


@st.composite
def megatron_configs(draw: st.DrawFn, *, moe: bool = True, dropout: bool = False) -> dict[str, Any]:
    """Fields of a ``TransformerConfig`` that a CPU can run: a base of your own, of four or more experts, goes with it.

    Args:
        moe: whether some layer is a MoE layer; else fields of dense layers alone.
        dropout: whether layers draw random numbers.
    """
    config: dict[str, Any] = {}
    recompute: list[str] = []
    if moe:
        config["moe_token_dispatcher_type"] = draw(st.sampled_from(["alltoall", "alltoall", "allgather"]))
        config["moe_router_topk"] = draw(st.sampled_from([1, 2, 2, 2]))
        config["moe_router_pre_softmax"] = config["moe_router_topk"] == 1
        kind = draw(st.sampled_from(["none", "aux_loss", "seq_aux_loss"]))
        config["moe_router_load_balancing_type"] = kind
        config["moe_aux_loss_coeff"] = 0.0 if kind == "none" else 1e-2
        if _one_in(draw, 3):
            config["moe_shared_expert_intermediate_size"] = 24
            config["moe_shared_expert_gate"] = draw(st.booleans())
            recompute += ["shared_experts"] if _one_in(draw, 4) else []
        config |= {"moe_latent_size": 16} if _one_in(draw, 5) else {}
        config |= {"moe_z_loss_coeff": 1e-3} if _one_in(draw, 5) else {}
        if _one_in(draw, 4):
            config["moe_grouped_gemm"] = True
            recompute += ["moe_act"] if draw(st.booleans()) else []
    if _one_in(draw, 3):
        recompute += draw(st.lists(st.sampled_from(["layernorm", "core_attn"]), unique=True, min_size=1))
    config |= {"recompute_granularity": "selective", "recompute_modules": recompute} if recompute else {}
    config |= {"bf16": True, "params_dtype": torch.bfloat16} if _one_in(draw, 5) else {}
    config |= {"normalization": "RMSNorm"} if _one_in(draw, 4) else {}
    config |= {"qk_layernorm": True} if _one_in(draw, 4) else {}
    config |= {"gated_linear_unit": True, "activation_func": torch.nn.functional.silu} if _one_in(draw, 4) else {}
    config |= {"hidden_dropout": 0.1, "attention_dropout": 0.1} if dropout else {}
    return config
