"""The demonstration itself: build, run both passes, compare, agree."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

from torch.nn import Module

from layernodes.demo.compare import Pass, Tick, first_difference, run_nodes, run_plain
from layernodes.demo.data import Text, make_microbatches
from layernodes.demo.model import build_model, layers_of
from layernodes.demo.report import DemoReport, MicrobatchLoss, Verdict, kind_of_layer, summarize
from layernodes.demo.settings import DemoSettings
from layernodes.demo.timing import SlotTimer
from layernodes.demo.world import World
from layernodes.plan.layer_plan import LayerPlan


def demonstrate(
    settings: DemoSettings,
    text: Text,
    world: World,
    *,
    tick: Tick,
    build: Callable[[Module], LayerPlan] = LayerPlan.build,
) -> DemoReport:
    """Run both passes and compare them; every rank of ``world`` calls it, and all get the same verdict.

    Args:
        tick: called after each of ``num_ticks(settings)`` pieces of work.
        build: makes the plan of a layer.
    """
    model = build_model(settings, num_ranks=world.num_ranks, device=world.device)
    microbatches = make_microbatches(
        text.content, settings.microbatches, rank=world.rank, num_ranks=world.num_ranks, device=world.device
    )
    plans = {layer: build(layer) for layer in layers_of(model)}
    timer = SlotTimer()
    plain = run_plain(model, microbatches, settings.seed, tick)
    nodes = run_nodes(model, microbatches, settings.seed, tick, plans, timer)
    return DemoReport(
        settings=settings,
        text_name=text.name,
        text_bytes=len(text.content),
        layer_kinds=tuple(kind_of_layer(plan) for plan in plans.values()),
        num_parameters=sum(parameter.numel() for parameter in model.parameters()),
        num_ranks=world.num_ranks,
        device=str(world.device),
        backend=world.backend,
        slots=summarize(timer.calls(), list(plans.values())),
        losses=_losses(plain, nodes, world),
        verdict=agree(plain, nodes, world),
        seconds_plain=plain.seconds,
        seconds_nodes=nodes.seconds,
    )


def num_ticks(settings: DemoSettings) -> int:
    """Pieces of work that ``demonstrate`` reports."""
    return 2 * settings.microbatches + 1


def _losses(plain: Pass, nodes: Pass, world: World) -> tuple[MicrobatchLoss, ...]:
    both = zip(_mean_losses(plain, world), _mean_losses(nodes, world), strict=True)
    return tuple(MicrobatchLoss(microbatch=i, plain=one, nodes=other) for i, (one, other) in enumerate(both))


def _mean_losses(result: Pass, world: World) -> Sequence[float]:
    of_ranks = world.gather([float(output.double().mean()) for output in result.outputs])
    return [statistics.fmean(losses) for losses in zip(*of_ranks, strict=True)]


def agree(plain: Pass, nodes: Pass, world: World) -> Verdict:
    """The verdict of all ranks: equal where all are, else the lowest rank's difference."""
    found = world.gather([difference] if (difference := first_difference(plain, nodes, rank=world.rank)) else [])
    differences = [difference for of_rank in found for difference in of_rank]
    return Verdict(
        equal=not differences,
        outputs=len(plain.outputs),
        gradients=sum(gradient is not None for gradient in plain.gradients.values()),
        difference=differences[0] if differences else None,
    )
