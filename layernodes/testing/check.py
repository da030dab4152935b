"""``check_node``: a user's node, put through what a schedule may do to it.

plan              the class is accepted, and fits the layer's other nodes
formula           one microbatch after the other: what the plain layer computes, bit for bit
interleaving      built-in and random schedules, on inline and thread streams, weight gradients deferred or not
happens-before    the same under recording streams, which see every read and write
life cycle        nothing on nodes and layers changes; forward alone; hooks; what the node says of itself is true
memory            no tensor of a microbatch is alive after it
faults            an exception at any operation of the node surfaces once, and leaves nothing behind
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Final

from torch.nn import Module

from layernodes.errors import LayerNodesError, OptionError, StepError, StreamOrderError
from layernodes.nodes import ScheduleNode
from layernodes.plan import schedules
from layernodes.plan.layer_plan import WgradMode
from layernodes.plan.registry import NodeFactory, SlotKey
from layernodes.plan.rng import RngMode
from layernodes.plan.schedule import Schedule
from layernodes.plan.wgrad import WgradPlace
from layernodes.slots import Phase
from layernodes.testing.aftermath import check_faults, check_life_cycle, check_memory
from layernodes.testing.bench import Batch, NodeBench, PlainLayer
from layernodes.testing.given import check_given
from layernodes.testing.hints import name_notes, stream_notes
from layernodes.testing.orders import random_schedule
from layernodes.testing.report import Check, Finding, NodeCheckError, NodeReport

_RESULT: Final = "what `forward` computes must depend on its inputs, the handoffs it takes and its parameters alone"


def check_node(
    node: NodeFactory,
    layer: Module | Sequence[Module],
    batches: Sequence[Batch],
    *,
    nodes: Mapping[SlotKey, NodeFactory] | None = None,
    plain: PlainLayer | None = None,
    examples: int = 20,
    seed: int = 0,
) -> NodeReport:
    """Put a node through schedules, and tell in words what is wrong with it.

    Deterministic: equal arguments run equal schedules, on every rank of a process group too.

    Args:
        node: the node's class, or a callable that takes the layer and returns the node.
        layer: the layer that it is a node of, or several, which run one after the other.
        batches: two to four inputs of the first layer, one a microbatch; each a tensor, or a tensor and a dict of
            attributes for the chunk state.
        nodes: the other nodes of the layer, by slot; a Megatron-Core layer has its own.
        plain: what the layer does without nodes, called with the layer and its input, such as ``MyLayer.forward``;
            None: the nodes one after the other in one graph, which finds lost gradients but no wrong formula.
        examples: number of random schedules.
        seed: chooses them.

    Returns:
        What was done, and notes: what is no fault and probably not meant.

    Raises:
        NodeCheckError: something is wrong; its text and its ``report`` say what, where, and what to change.
        ArgumentError: an argument of another kind, such as a node object for its class, or one tensor for the batches.
        OptionError: the arguments do not fit: one batch alone, no layer, or no schedule.
    """
    check_given(node, layer, batches, nodes, plain, examples, seed)
    if not 2 <= len(batches) <= 4 or examples < 1:
        raise OptionError(
            f"check_node was given {len(batches)} batches and examples={examples}; give 2 to 4 batches, since "
            f"one alone cannot be interleaved, and 1 or more examples"
        )
    layers = [layer] if isinstance(layer, Module) else list(layer)
    examination = _Examination(node, layers, batches, dict(nodes or {}), plain)
    report = examination.run(examples, seed)
    if report.findings:
        raise NodeCheckError(report)
    return report


class _Examination:
    """One call of ``check_node``."""

    def __init__(
        self,
        node: NodeFactory,
        layers: Sequence[Module],
        batches: Sequence[Batch],
        nodes: dict[SlotKey, NodeFactory],
        plain: PlainLayer | None,
    ) -> None:
        self._node, self._layers, self._batches, self._nodes, self._plain = node, layers, batches, nodes, plain
        self._name = getattr(node, "__name__", repr(node))
        self._findings: list[Finding] = []
        self._done: list[Check] = []
        self._num_schedules = self._num_faults = 0

    def run(self, examples: int, seed: int) -> NodeReport:
        """Everything, as far as it makes sense."""
        notes: list[str] = []
        benches = self._within(Check.PLAN, "mend what the message says", self._build)
        if benches and self._check_formula(benches):
            for bench in benches:
                self._check_interleaving(bench, examples, seed)
            for check, look in (
                (Check.HAPPENS_BEFORE, self._check_order),
                (Check.LIFE_CYCLE, check_life_cycle),
                (Check.MEMORY, check_memory),
                (Check.FAULTS, self._check_faults),
            ):
                self._findings += self._within(check, "see the message", partial(look, benches[-1], self._slot))
            notes = stream_notes(benches[0], self._slot)
        notes += name_notes(benches[0].chunk.layers[0].nodes[self._slot]) if benches else []
        return NodeReport(
            node=self._name,
            done=tuple(self._done),
            schedules=self._num_schedules,
            faults=self._num_faults,
            findings=tuple(dict.fromkeys(self._findings)),
            notes=tuple(notes),
        )

    def _within[T](self, check: Check, advice: str, look: Callable[[], Iterable[T]]) -> list[T]:
        """What a check returns; whatever it raises is a finding."""
        self._done += [] if check in self._done else [check]
        try:
            return list(look())
        except Exception as error:
            found = str(error) if isinstance(error, LayerNodesError) else f"{type(error).__name__}: {error}"
            self._findings.append(Finding(check=check, found=found, advice=_advice(error, check) or advice))
            return []

    def _build(self) -> list[NodeBench]:
        made = self._node(self._layers[0])
        if not isinstance(made, ScheduleNode):
            raise OptionError(
                f"{self._name} made {type(made).__name__}; give a node class or a callable that makes one"
            )
        self._name = type(made).__name__
        self._slot: SlotKey = made.slot
        nodes = {**self._nodes, made.slot: self._node}
        benches = []
        for wgrad in (WgradMode.OFF, WgradMode.AUTO):
            bench = NodeBench(self._layers, nodes, self._batches, self._plain, wgrad)
            if wgrad is WgradMode.OFF or any(bench.chunk.shape.wgrad_slots):
                benches.append(bench)
        remade = benches[0].remade(made.slot)
        if remade:
            self._findings.append(
                Finding(
                    check=Check.PLAN,
                    found=f"{self._name} makes parameters of its own: {_list(remade)}",
                    advice="let the layer hold them, and the node take them from there: a node is made anew for each "
                    "plan, with other values then, and no optimizer and no checkpoint has what a node alone holds",
                )
            )
            return []
        return benches

    def _check_formula(self, benches: Sequence[NodeBench]) -> bool:
        def look() -> list[str]:
            wrong = []
            for bench in benches:
                schedule = schedules.serial(bench.chunk.shape, bench.num_microbatches)
                self._num_schedules += 1
                wrong += bench.differing(bench.run(schedule, rng=RngMode.PLAIN), rng=RngMode.PLAIN)
            return wrong

        wrong = self._within(Check.FORMULA, "mend what the message says", look)
        if wrong:
            named = "the plain layer" if self._plain else "its nodes in one graph"
            self._findings.append(
                Finding(
                    check=Check.FORMULA,
                    found=f"one microbatch after the other, the layer does not give what {named} gives: {_list(wrong)}",
                    advice="compare forward with the plain layer's; let every tensor that one slot makes and another "
                    "uses be an output or a declared handoff, never detached; let modules() name every module used",
                )
            )
        return not self._findings

    def _check_interleaving(self, bench: NodeBench, examples: int, seed: int) -> None:
        for number, (name, schedule) in enumerate(_schedules(bench, examples, seed)):
            streams = ("inline", "threads")[number % 2]

            def look(schedule: Schedule = schedule, streams: str = streams) -> list[str]:
                return bench.differing(bench.run(schedule, streams=streams))

            self._num_schedules += 1
            wrong = self._within(Check.INTERLEAVING, _RESULT, look)
            if wrong:
                self._findings.append(
                    Finding(
                        check=Check.INTERLEAVING,
                        found=f"{name} on {streams} streams changes {_list(wrong)}",
                        advice=f"{_RESULT}; keep nothing of a microbatch on the node, the layer or a module, where "
                        f"the next microbatch overwrites it",
                    )
                )
            if self._findings:  # one place is enough; the next checks tell more
                return

    def _check_order(self, bench: NodeBench, slot: SlotKey) -> Iterable[Finding]:
        for _, schedule in _schedules(bench, 5, 0):
            self._num_schedules += 1
            bench.run(schedule, streams="recording")
        return []

    def _check_faults(self, bench: NodeBench, slot: SlotKey) -> Iterable[Finding]:
        self._num_faults, findings = check_faults(bench, slot)
        return findings


def _schedules(bench: NodeBench, examples: int, seed: int) -> Iterable[tuple[str, Schedule]]:
    shape, count = bench.chunk.shape, bench.num_microbatches
    for name in ("forward_forward", "combined_1f1b"):
        schedule = schedules.BUILT_IN[name](shape, count)
        yield f"schedules.{name}", schedule
        if any(shape.wgrad_slots):
            yield f"schedules.{name}, weight gradients at the end", schedules.deferred(schedule, shape, WgradPlace.END)
    for number in range(examples):
        yield f"random schedule {seed + number}", random_schedule(shape, count, random.Random(seed + number))


def _advice(error: Exception, check: Check) -> str | None:
    if isinstance(error, StreamOrderError):
        return "what one slot makes and another uses must be an output or a declared handoff, of this microbatch"
    if isinstance(error, StepError) and error.step.startswith(Phase.W.value):
        return (
            "backward_dw() of the hook, or what it calls, must compute what the backward of this microbatch held back; "
            "where no module holds its gradients back, leave wgrad_hook() out: those of linears are deferred without it"
        )
    if isinstance(error, StepError) and check is not Check.FORMULA:  # there, microbatches do not interleave
        return (
            "the message is the node's own error; if it does not come up under schedules.serial too, it is because "
            "microbatches interleave as this schedule has it"
        )
    return None


def _list(names: Sequence[Any]) -> str:
    shown = list(dict.fromkeys(map(str, names)))
    return ", ".join(shown[:4]) + (f" and {len(shown) - 4} more" if len(shown) > 4 else "")
