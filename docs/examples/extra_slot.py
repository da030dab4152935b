"""Give layers a slot of your own, with steps that a schedule places.

A probe after the experts, on the communication stream, beside which the other microbatch computes: it measures what the
experts return. The layer's numbers do not change. Run it: ``python docs/examples/extra_slot.py``.
"""

from __future__ import annotations

from typing import Any

import torch
from tiny_model import TOKENS, make_model, one_process, run_plainly
from torch import Tensor

from layernodes import ChunkPlan, ExtraSlot, NodeContext, Runner, ScheduleNode, Slot, StreamType, schedules

PROBE = ExtraSlot("probe", after=Slot.MLP, stream=StreamType.COMM)


class ProbeNode(ScheduleNode):
    """Notes the size of what the experts return, one number a microbatch, and hands it on."""

    slot = PROBE
    stream = StreamType.COMM

    def __init__(self, layer: Any, found: list[float]) -> None:
        self._note = found.append

    def forward(self, ctx: NodeContext, *inputs: Tensor) -> Tensor:
        self._note(inputs[0].detach().norm().item())
        return inputs[0]

    def touches_rng(self) -> bool:
        return False  # so it need not wait for steps that may draw


def main() -> None:
    """Two microbatches at once, with the probe's steps in the schedule, compared with the plain model."""
    with one_process():
        plain, nodes = make_model(), make_model()
        expected = run_plainly(plain)
        run_plainly(plain)
        found: list[float] = []
        chunk = ChunkPlan.build(nodes, nodes={PROBE: lambda layer: ProbeNode(layer, found)})
        order = schedules.forward_forward(chunk.shape, 2)
        batch = {"input_ids": TOKENS, "position_ids": torch.arange(8).expand(2, 8), "attention_mask": None}
        with Runner("threads") as runner:
            result = runner.run(order, chunk, [{**batch, "labels": TOKENS}] * 2)
        steps = [str(step) for step in order if step.slot == "probe"]
        print(f"{len(steps)} steps: {' '.join(steps)}")
        print(f"{len(found)} probes, of two equal microbatches: {found[0] == found[1] and found[2] == found[3]}")
        gradients = zip(plain.parameters(), nodes.parameters(), strict=True)
        equal = all(torch.equal(output, expected) for output in result.outputs)
        equal &= all(torch.equal(a.grad, b.grad) for a, b in gradients)
        print(f"bitwise {'equal' if equal else 'DIFFERENT'}: losses and {len(list(plain.parameters()))} gradients")


if __name__ == "__main__":
    main()
