"""What runs leave behind: on nodes and layers, in memory, and after an exception."""

from __future__ import annotations

import gc
import random
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from layernodes._megatron.rng import Generators
from layernodes.errors import StepError
from layernodes.nodes import ScheduleNode
from layernodes.plan import schedules
from layernodes.plan.registry import SlotKey
from layernodes.plan.schedule import Schedule
from layernodes.plan.step import Step
from layernodes.release import may_release
from layernodes.slots import Slot
from layernodes.testing.bench import NodeBench, is_equal, node_names
from layernodes.testing.hooks import check_hooks
from layernodes.testing.orders import random_schedule
from layernodes.testing.report import Check, Finding
from layernodes.testing.watch import Watch, attributes, changed, no_collection, owners_of

_FAULTS_A_STEP: Final = 8


def check_life_cycle(bench: NodeBench, slot: SlotKey) -> Iterator[Finding]:
    """Nothing changes on nodes and layers; forward runs alone; what the nodes say of themselves is true."""
    owners = owners_of(node_names(bench.chunk), _named_layers(bench))
    names = sorted(_changed_by(owners, lambda: bench.run(_mixed(bench))) - _changed_by(owners, lambda: _plain(bench)))
    if names:
        yield Finding(
            check=Check.LIFE_CYCLE,
            found=f"a run changes {', '.join(names)}",
            advice="a node is shared by all microbatches and does not change after it is built: keep what belongs to a "
            "microbatch in handoffs (put, take) or in the autograd graph",
        )
    yield from _check_forward_alone(bench)
    for name, node in node_names(bench.chunk):
        if node.slot == slot:
            yield from _check_inputs(bench, name, node)
    yield from check_hooks(bench, slot)
    yield from _check_random_numbers(bench)


def check_memory(bench: NodeBench, slot: SlotKey) -> Iterator[Finding]:
    """No tensor of a microbatch is alive when it is done, though the garbage collector did not run."""
    owners = owners_of(node_names(bench.chunk), _named_layers(bench))
    bench.run(_mixed(bench))  # what is made once and kept, such as a cache of masks, is there now
    watch = Watch()
    with no_collection(), watch:
        bench.run(_mixed(bench), before_step=watch.begin, after_step=watch.end)
        bench.restore()
        alive = watch.alive(owners)
    if alive:
        yield Finding(
            check=Check.MEMORY,
            found=f"after the run {_few(alive)}",
            advice="drop every reference to a microbatch's tensors when its last use is over: hand them on with put "
            "and take, and let an autograd.Function keep tensors with save_for_backward",
        )


def check_faults(bench: NodeBench, slot: SlotKey) -> tuple[int, list[Finding]]:
    """An exception at operations of the node's steps; returns how many were planted, and what is wrong."""
    name = slot.value if isinstance(slot, Slot) else slot.name
    schedule = _mixed(bench)
    owners = owners_of(node_names(bench.chunk), _named_layers(bench))
    watch = Watch()
    before = attributes(owners)
    with watch:
        bench.run(schedule, before_step=watch.begin, after_step=watch.end)
    usual = {*changed(before, attributes(owners)), *watch.alive(owners)}  # told of by other checks
    places = [
        (str(step), number)
        for step in schedule
        if step.slot == name and step.layer == 0 and step.microbatch == 0
        for number in _spread(watch.num_operations[str(step)])
    ]
    findings: dict[str, Finding] = {}
    for text, number in places:
        for finding in _plant(bench, schedule, text, number, usual):
            findings.setdefault(text, finding)
    return len(places), list(findings.values())


def _plant(bench: NodeBench, schedule: Schedule, text: str, number: int, usual: set[str]) -> Iterator[Finding]:
    owners = owners_of(node_names(bench.chunk), _named_layers(bench))
    watch = Watch(raise_at=(text, number))

    def fail() -> str | None:
        try:
            with watch:
                bench.run(schedule, before_step=watch.begin, after_step=watch.end)
        except StepError as error:
            traceback.clear_frames(None if error.__cause__ is None else error.__cause__.__traceback__)
            return error.step
        finally:
            # What an exception left in autograd's queue waits there for this thread's next backward.
            torch.autograd.backward(torch.ones(1, requires_grad=True).sum())
        return None

    before = attributes(owners)
    step = fail()
    if step != text:
        found = "was swallowed" if step is None else f"surfaced at {step}"
        yield Finding(
            check=Check.FAULTS,
            found=f"an exception in {text} {found}",
            advice="let exceptions pass: no bare except in forward, backward or a hook",
        )
    bench.restore()
    names = sorted(changed(before, attributes(owners)))
    if not usual.issuperset(watch.alive(owners)):
        gc.collect()  # a traceback may be part of a cycle
    left = [text for text in (*names, *watch.alive(owners)) if text not in usual]
    if left:
        yield Finding(
            check=Check.FAULTS,
            found=f"an exception in {text} (operation {number}) leaves behind: {_few(left)}",
            advice="undo in a finally, or a context manager, what forward sets on objects that outlive the microbatch",
        )
    else:
        wrong = bench.differing(bench.run(schedule))
        if wrong:
            yield Finding(
                check=Check.FAULTS,
                found=f"after an exception in {text} (operation {number}) the next run is wrong: {_few(wrong)}",
                advice="undo in a finally what forward sets, and clear what a failed microbatch may have left",
            )


def _check_forward_alone(bench: NodeBench) -> Iterator[Finding]:
    shape = bench.chunk.shape
    forward = random_schedule(shape, bench.num_microbatches, random.Random(1), "forward")
    result = bench.run(forward)
    trained = bench.run(_mixed(bench))
    if not all(is_equal(a, b) for a, b in zip(result.outputs, trained.outputs, strict=True)):
        yield Finding(
            check=Check.LIFE_CYCLE,
            found="a forward alone, without gradients, returns something else than the forward of a training step",
            advice="let the output not depend on torch.is_grad_enabled() or on requires_grad",
        )


def _check_inputs(bench: NodeBench, name: str, node: ScheduleNode) -> Iterator[Finding]:
    """A node that says it keeps no input must not keep one."""
    if node.keeps_input():
        return
    kept: list[bool] = []

    def visit(visited: ScheduleNode, ctx: Any, *inputs: Any) -> Any:
        if type(visited) is not type(node):
            return visited(ctx, *inputs)
        outers = [value.detach().clone() if isinstance(value, Tensor) else value for value in inputs]
        inners = [
            outer.detach().requires_grad_(value.requires_grad) if isinstance(outer, Tensor) else outer
            for outer, value in zip(outers, inputs, strict=True)
        ]
        outputs = visited(ctx, *inners)
        pairs = zip(outers, inners, strict=True)
        kept.extend(not may_release(a, b) for a, b in pairs if isinstance(a, Tensor) and isinstance(b, Tensor))
        return outputs

    leaf, given = bench.leaves()[0]
    bench.restore()
    bench.joined(leaf, given, visit)
    if any(kept):
        yield Finding(
            check=Check.LIFE_CYCLE,
            found=f"{name}.keeps_input() is False, but its input is still used after forward: saved for backward, or "
            f"in an output or a handoff",
            advice="return True, the default; a caller that frees inputs would else free this one too early",
        )


def _check_random_numbers(bench: NodeBench) -> Iterator[Finding]:
    generators = Generators()
    places = {(place.layer, place.slot): place for place in bench.chunk.places}
    before: dict[str, Tensor] = {}
    found: dict[str, None] = {}

    def begin(_: Step) -> None:
        before.update(generators.states())

    def end(step: Step) -> None:
        place = places[step.layer, step.slot]
        is_equal = all(torch.equal(before[name], state) for name, state in generators.states().items())
        if not is_equal and not place.touches_rng:
            found[type(place.node).__name__] = None

    bench.run(_mixed(bench), rng="plain", before_step=begin, after_step=end)
    for name in found:
        yield Finding(
            check=Check.LIFE_CYCLE,
            found=f"{name}.touches_rng() is False, but it draws random numbers",
            advice="return True, the default: steps that draw must run in the schedule's order",
        )


def _mixed(bench: NodeBench) -> Schedule:
    """A schedule with every microbatch in flight at once, each W as late as can be."""
    shape = bench.chunk.shape
    schedule = schedules.forward_forward(shape, bench.num_microbatches, group=bench.num_microbatches)
    return schedules.deferred(schedule, shape, "end") if any(shape.wgrad_slots) else schedule


def _spread(count: int) -> Iterable[int]:
    """A few of ``count`` numbers, the first and the last among them."""
    most = min(count, _FAULTS_A_STEP)
    return sorted({round(i * (count - 1) / max(most - 1, 1)) for i in range(most)})


def _few(texts: Sequence[str]) -> str:
    return "; ".join(texts[:3]) + (f"; and {len(texts) - 3} more" if len(texts) > 3 else "")


def _changed_by(owners: dict[str, object], act: Callable[[], object]) -> set[str]:
    act()
    before = attributes(owners)
    act()
    return changed(before, attributes(owners))


def _plain(bench: NodeBench) -> None:
    bench.restore()
    for leaf, given in bench.leaves():
        bench.plainly(leaf, given)


def _named_layers(bench: NodeBench) -> list[tuple[str, Any]]:
    if len(bench.layers) == 1:
        return [("layer", bench.layers[0])]
    return [(f"layer {i}", layer) for i, layer in enumerate(bench.layers)]
