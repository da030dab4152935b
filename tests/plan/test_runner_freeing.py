"""Storages are freed where that is safe and kept where it is not (case 12).

In processes of their own: where freeing is wrong, it may be a segmentation fault.
"""

from __future__ import annotations

import json
import textwrap

from tests.support.full import FULL
from tests.support.launched import launched

_NEGATIVE = """
    import weakref
    import torch
    from torch.nn import Linear, Module
    from torch.utils._python_dispatch import _disable_current_modes
    from layernodes import ChunkPlan, LayerPlan, Runner, ScheduleNode, Slot, StreamType, schedules

    CASES = {
        "linear": (lambda x, w: x * 2, lambda lin, a: lin(a)),
        "cast": (lambda x, w: (x * 2).float(), lambda lin, a: lin(a.double())),
        "product": (lambda x, w: x * 2, lambda lin, a: a * lin.weight.sum()),
        "view": (lambda x, w: x * 2, lambda lin, a: a.view(-1).view(4, 3) + lin.weight.sum()),
        "relu": (lambda x, w: x * 2, lambda lin, a: torch.relu(a) @ lin.weight),
        "saved by its producer": (lambda x, w: x.exp(), lambda lin, a: a + lin.weight.sum()),
        "one storage, two outputs": (
            lambda x, w: (x * 2).split(2), lambda lin, a, b: lin(torch.cat([a * 2, b]))),
        "one tensor twice": (lambda x, w: (lambda y: (y, y))(x * 2), lambda lin, a, b: lin(a * 1 + b * 2)),
        "the caller's own": (lambda x, w: x, lambda lin, a: lin(a * 2)),
        "kept by its producer": (lambda x, w: keep(x * 2), lambda lin, a: a * 3 + lin.weight.sum()),
        "kept in the tuple returned": (
            lambda x, w: keep((x * 2, x * 3)), lambda lin, a, b: a * b.detach() + lin.weight.sum()),
        "returned as it is": (lambda x, w: x * 2, lambda lin, a: a),
        "safe": (lambda x, w: x * 2, lambda lin, a: a * 3 + lin.weight.sum()),
    }

    def nodes_of(first, second):
        class First(ScheduleNode):
            slot, stream = Slot.PRE_DISPATCH_COMPUTATION, StreamType.COMPUTE
            def __init__(self, layer): self.linear = layer
            def forward(self, ctx, x):
                out = first(x, self.linear.weight)
                made[:] = map(weakref.ref, out if isinstance(out, tuple) else (out,))
                return out

        class Freeing(ScheduleNode):
            slot, stream = Slot.MLP, StreamType.COMPUTE
            def __init__(self, layer): self.linear = layer
            def forward(self, ctx, *inputs): return second(self.linear, *inputs)
            def frees_input(self): return True

        return {Slot.PRE_DISPATCH_COMPUTATION: First, Slot.MLP: Freeing}

    FREED = {"cast", "view", "relu", "safe"}  # what autograd does not save, and no output shares
    made = []
    remembered = []

    def keep(out):
        remembered.append(out)
        return out

    def look(step):
        if str(step) == "F0.L0.mlp":
            for made_by_first in made:
                tensor = made_by_first()
                # Streams without a device empty a storage, the recording ones fill it with NaN.
                with _disable_current_modes():
                    is_gone = tensor.untyped_storage().nbytes() == 0 or bool(tensor.isnan().any())
                assert is_gone == (name in FREED), (name, streams, "freed" if is_gone else "kept")
            looked.append(streams)

    for name, (first, second) in CASES.items():
        print(name, flush=True)
        torch.manual_seed(1)
        linear = Linear(3, 3, dtype=torch.float64)
        x = torch.randn(4, 3, dtype=torch.float64).requires_grad_()
        h = first(x, linear.weight)
        y = second(linear, *(h if isinstance(h, tuple) else (h,)))
        expected = [y.detach(), *torch.autograd.grad(y, [x, linear.weight], torch.ones_like(y), allow_unused=True)]
        chunk = ChunkPlan.of([LayerPlan.build(linear, nodes=nodes_of(first, second))])
        looked = []
        for streams in ("inline", "threads", "recording"):
            linear.zero_grad()
            with Runner(streams=streams, after_step=look) as runner:
                out = runner.run(schedules.serial(chunk.shape, 1), chunk, [x])
            found = [out.outputs[0], out.input_grads[0], linear.weight.grad]
            for a, b in zip(found, expected):
                assert a is b or torch.equal(a, b), (name, streams)
        assert looked == ["inline", "threads", "recording"]
    print("right")
"""


def _run(*arguments: str, really: bool = FULL) -> str:
    done = launched(*arguments, really=really)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    return done.stdout


def test_kept_where_somebody_uses_it() -> None:
    """A node that permits freeing its input: freed where safe, kept where not, and the plain layer's bits always."""
    assert _run("-c", textwrap.dedent(_NEGATIVE)).endswith("right\n")


def test_without_counters_everything_is_kept() -> None:
    """A torch that cannot tell how many hold a storage: nothing is freed, and the bits are right."""
    less = """
        import torch
        del torch._C._storage_Use_Count
    """
    script = textwrap.dedent(_NEGATIVE).replace('FREED = {"cast", "view", "relu", "safe"}', "FREED = set()")
    assert _run("-c", textwrap.dedent(less) + script, really=True).endswith("right\n")


def test_megatrons_layers() -> None:
    """Of one local expert, whose input is the dispatched storage, and where dispatch returns its input: kept."""
    found = json.loads(
        _run("-m", "tests.support.kept_storages", "alltoall-experts1-ep1", "alltoall-moe-ep1").splitlines()[-1]
    )
    for kept, differing in found.values():
        assert differing == []
        assert kept["F0.L0.moe_dispatch"] == [True, True]
        assert kept["F0.L0.mlp"] == [True]
    assert found["alltoall-moe-ep1"][0]["F0.L0.moe_combine"] == [False]  # the one that Megatron-Core frees too
