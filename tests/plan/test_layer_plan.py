"""Layer plans: what is built, what is refused, and that the plain layer's bits come out."""

from __future__ import annotations

import gc
import json
import time
import weakref
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch
from megatron.core.models.common import fine_grained_callables
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from torch import Tensor, nn

from layernodes import (
    MEGATRON_SLOTS,
    CombineNode,
    DispatchNode,
    ExpertNode,
    LayerNodesError,
    LayerPlan,
    MTPPostNode,
    OptionError,
    PlanError,
    PreDispatchNode,
    ScheduleNode,
    Slot,
    StreamType,
    UnsupportedLayerError,
)
from layernodes.state import HandoffMap, NodeContext
from tests.support.build import make_model
from tests.support.configs import Cell, by_name
from tests.support.fixtures import MEGATRON_WORLD, megatron_world  # noqa: F401
from tests.support.slots import SlotRun, assert_equal_gradients, chunk_state, take_gradients

pytestmark = MEGATRON_WORLD

P, D, M, C, POST = MEGATRON_SLOTS
_MOE = by_name("alltoall-moe-ep1")
_OVERLAP_LATE = {"overlap_moe_expert_parallel_comm": True, "delay_wgrad_compute": True}


def _layer(cell: Cell = _MOE, index: int = 0) -> Any:
    return make_model(cell).decoder.layers[index]


def _input(seed: int = 7, *, rows: int = 6) -> Tensor:
    return torch.randn(rows, 2, 32, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def _plain(layer: Any, x: Tensor, grad: Tensor) -> tuple[Tensor, Tensor | None, Mapping[str, Tensor | None]]:
    outputs: list[Tensor] = []

    def run() -> None:
        output, _ = layer(hidden_states=x, attention_mask=None)
        outputs.append(output.detach())
        output.backward(grad)

    grads = take_gradients(layer, run)
    input_grad, x.grad = x.grad, None
    return outputs[0], input_grad, grads


def _through(
    plan: LayerPlan, x: Tensor, grad: Tensor, **options: Any
) -> tuple[Tensor, Any, Mapping[str, Tensor | None]]:
    results: list[Any] = []

    def run() -> None:
        slots = SlotRun(plan, **options)
        output = slots.forward(x)
        results.append(output.detach())
        results.append(slots.backward(grad))

    grads = take_gradients(plan.layer, run)
    return results[0], results[1], grads


def _assert_equal(plan: LayerPlan, **options: Any) -> None:
    """One microbatch through the plan equals the plain layer's, bit for bit."""
    x = _input()
    grad = torch.randn(x.shape, generator=torch.Generator().manual_seed(3))
    state, tracked = torch.get_rng_state(), get_cuda_rng_tracker().get_states()
    expected, expected_input, expected_grads = _plain(plan.layer, x, grad)
    torch.set_rng_state(state)
    get_cuda_rng_tracker().set_states(tracked)
    actual, actual_input, actual_grads = _through(plan, x, grad, **options)
    assert torch.equal(expected, actual)
    assert torch.equal(expected_input, actual_input)
    assert_equal_gradients(expected_grads, actual_grads)


class TestContract:
    """What Megatron-Core's schedule plan relies on, against the installed megatron-core."""

    def test_exactly_five_in_slot_order(self) -> None:
        """Four callables and None, unpackable, named by the slots; as many as Megatron's own builder returns."""
        funcs, hooks = LayerPlan.build(_layer()).callables()
        pre_dispatch, dispatch, mlp, combine, post = funcs
        assert [pre_dispatch.slot, dispatch.slot, mlp.slot, combine.slot] == [P, D, M, C]
        assert post is None
        assert funcs._fields == tuple(slot.value for slot in MEGATRON_SLOTS)
        own_funcs, own_hooks = fine_grained_callables.build_layer_callables(_layer())
        assert len(own_funcs) == len(funcs)
        assert own_hooks.keys() == hooks.keys()

    def test_five_under_mtp(self) -> None:
        """An MTP layer has a callable in the fifth slot; dense inner layers too."""
        for name in ("mtp-aux-ep1", "mtp-dense-inner-ep1"):
            funcs = LayerPlan.build(make_model(by_name(name)).mtp.layers[0]).forward_funcs
            assert isinstance(funcs.mtp_post_process, MTPPostNode)
            assert all(callable(func) for func in funcs)

    def test_called_with_a_node_and_tensors(self) -> None:
        """Each callable takes the node first, then tensors, and returns a tensor or a tuple."""
        plan = LayerPlan.build(_layer())
        run = SlotRun(plan, proving=False)
        value: Any = _input()
        for slot, func in zip((P, D, M, C), plan.forward_funcs, strict=False):
            arguments = value if isinstance(value, tuple) else (value,)
            value = func(run.nodes[slot.value], *(t.detach() for t in arguments))
            assert isinstance(value, Tensor) or all(isinstance(t, Tensor) for t in value)

    def test_dense_dispatch_and_combine_raise(self) -> None:
        """They exist for a dense layer and raise NotImplementedError, as Megatron's do."""
        funcs = LayerPlan.build(_layer(by_name("dense"))).forward_funcs
        for func, name in ((funcs.moe_dispatch, "moe_dispatch"), (funcs.moe_combine, "moe_combine")):
            with pytest.raises(NotImplementedError, match=f"this TransformerLayer has no {name}"):
                func(None, torch.ones(2))

    def test_the_hooks_are_fresh_and_mutable(self) -> None:
        """The MTP builder edits the dict; no two builds share it, nor the layer's spent-once wrapper."""
        layer = _layer()
        plan = LayerPlan.build(layer)
        first, second = plan.backward_dw, plan.backward_dw
        assert first is not second
        first["pre_dispatch_computation"] = [first["pre_dispatch_computation"], nn.Linear(2, 2)]
        assert not isinstance(plan.backward_dw["pre_dispatch_computation"], list)
        first_hook, second_hook = second["pre_dispatch_computation"], plan.backward_dw["pre_dispatch_computation"]
        second_hook.backward_dw()
        first_hook.backward_dw()  # a wrapper that another build had spent would raise

    def test_the_wrapper_is_made_for_each_build(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """``init_backward_dw_wrapper`` runs once a build, as in Megatron's builder."""
        layer = _layer()
        calls = []
        original = type(layer).init_backward_dw_wrapper
        monkeypatch.setattr(
            type(layer), "init_backward_dw_wrapper", lambda self: (calls.append(self), original(self))[1]
        )
        plan = LayerPlan.build(layer)
        calls.clear()
        plan.callables()
        plan.callables()
        assert calls == [layer, layer]

    @pytest.mark.parametrize("name", ["alltoall-shared-ep1", "latent-shared-ep1", "dense", "mtp-latent-ep1"])
    def test_hooks_own_parameters(self, name: str) -> None:
        """Every hook, alone or in a list, has ``backward_dw()`` and ``parameters()``; together they own the layer's
        linears once."""
        model = make_model(by_name(name))
        layer = model.mtp.layers[0] if name.startswith("mtp") else model.decoder.layers[0]
        owned: list[int] = []
        for value in LayerPlan.build(layer).backward_dw.values():
            for hook in value if isinstance(value, list) else [value]:
                owned.extend(id(parameter) for parameter in hook.parameters())
                hook.backward_dw()
        assert len(owned) == len(set(owned))
        names = {id(p): n for n, p in layer.named_parameters()}
        missing = {n for i, n in names.items() if i not in owned}
        assert all("norm" in n or "router" in n for n in missing), missing

    def test_latent_hooks_are_drained_with_mlp(self) -> None:
        """Megatron drains two slots only: the hook of ``fc2_latent_proj`` is appended to ``mlp``."""
        layer = _layer(by_name("latent-ep1"))
        hooks = LayerPlan.build(layer).backward_dw["mlp"]
        assert isinstance(hooks, list)
        weight = layer.mlp.fc2_latent_proj.weight
        assert any(weight is parameter for parameter in hooks[-1].parameters())


class TestDescribe:
    """``describe()`` is data that says what each slot does."""

    def test_dumps_to_json(self) -> None:
        """Slots in order, with stream, class, handoffs and the parameters whose gradients the hook delivers."""
        description = LayerPlan.build(_layer(), wgrad="auto").describe()
        data = json.loads(description.model_dump_json())
        assert [node["slot"] for node in data["nodes"]] == [slot.value for slot in (P, D, M, C)]
        assert [node["stream"] for node in data["nodes"]] == ["compute", "comm", "compute", "comm"]
        assert data["nodes"][1]["writes"] == {"dispatched_probs": "Tensor", "pass_to_mlp": "LayerPass"}
        assert "self_attention.linear_proj.weight" in data["nodes"][0]["wgrad"]
        assert all("experts" in name for name in data["nodes"][2]["wgrad"])
        assert "pre_dispatch_computation" in str(description)

    @pytest.mark.parametrize(
        ("name", "slot", "text"),
        [
            ("alltoall-moe-ep1", D, "nothing is exchanged"),
            ("alltoall-moe-ep1", M, None),
            ("allgather-moe-ep1", P, "a view of the norm's output"),
            ("allgather-moe-ep1", C, "freed by slot name"),
            ("drop-pad-ep1", M, "freed by slot name"),
            ("alltoall-experts1-ep1", M, None),
        ],
    )
    def test_says_where_copies_are_made(self, name: str, slot: Slot, text: str | None) -> None:
        """Where Megatron's own node class would free what is still used, the node works on or hands on a copy."""
        nodes = {node.slot: node for node in LayerPlan.build(_layer(by_name(name))).describe().nodes}
        copies = nodes[slot.value].copies
        assert (copies == ()) if text is None else any(text in reason for reason in copies)

    def test_a_dense_layer_copies_nothing(self) -> None:
        """Megatron never frees the inputs of a dense layer."""
        assert all(node.copies == () for node in LayerPlan.build(_layer(by_name("dense"))).describe().nodes)


_LAYERS = (
    *(
        "alltoall-moe-ep1",
        "alltoall-experts1-ep1",
        "alltoall-experts4-ep1",
        "allgather-moe-ep1",
        "allgather-shared-ep1",
    ),
    *("allgather-experts1-ep1", "shared-overlap-ep1", "alltoall-shared-gate-ep1", "drop-pad-ep1", "drop-position-ep1"),
    *("latent-shared-ep1", "dense", "dense-dropout", "alltoall-dropout-ep1", "recompute-all-ep1", "hybridep-ep1"),
    *("linear-bias-ep1", "alltoall-aux-ep1", "expert-bias-ep1", "post-norm-ep1", "grouped-experts1-ep1"),
)


class TestPlainLayer:
    """The nodes of a layer equal ``layer(...)`` in outputs, input gradient and parameter gradients, bit for bit."""

    @pytest.mark.parametrize("proving", [False, True], ids=["by-name", "on-proof"])
    @pytest.mark.parametrize("name", _LAYERS)
    def test_one_layer(self, name: str, proving: bool) -> None:
        """Under Megatron's own node class, which frees by slot name, and under the proving one."""
        _assert_equal(LayerPlan.build(_layer(replace(by_name(name), position="none"))), proving=proving)

    @pytest.mark.parametrize("name", ["alltoall-moe-ep1", "latent-shared-ep1", "allgather-moe-ep1"])
    def test_split_combine(self, name: str) -> None:
        """With ``split_combine`` the sixth slot is fused into combine in the five callables; the bits are the same."""
        plan = LayerPlan.build(_layer(replace(by_name(name), position="none")), split_combine=True)
        assert list(plan.nodes) == [P, D, M, C, Slot.POST_COMBINE]
        assert len(plan.forward_funcs) == 5
        _assert_equal(plan, proving=False)
        _assert_equal(plan)

    def test_a_plan_serves_many_microbatches_in_flight(self) -> None:
        """Two forwards in flight slot by slot, then two backwards: each equals its own plain run."""
        for name in ("recompute-all-ep1", "shared-overlap-ep1", "allgather-shared-gate-ep1", "drop-pad-ep1"):
            plan = LayerPlan.build(_layer(replace(by_name(name), position="none")))
            inputs = [_input(1), _input(2, rows=4)]
            grads = [torch.randn(x.shape, generator=torch.Generator().manual_seed(i)) for i, x in enumerate(inputs)]
            expected = [_plain(plan.layer, x, grad) for x, grad in zip(inputs, grads, strict=True)]
            plan.layer.zero_grad(set_to_none=True)
            runs = [SlotRun(plan) for _ in inputs]
            steps = [run.steps(x) for run, x in zip(runs, inputs, strict=True)]
            for _ in plan.nodes:
                outputs = [next(step) for step in steps]
            values: list[Any] = list(grads)
            for slot in reversed(plan.nodes):
                values = [run.nodes[slot.value].backward(value) for run, value in zip(runs, values, strict=True)]
            for (output, input_grad, _), actual, actual_grad in zip(expected, outputs, values, strict=True):
                assert torch.equal(output, actual), name
                assert torch.equal(input_grad, actual_grad), name
            for parameter_name, parameter in plan.layer.named_parameters():
                parts = [grads_of[parameter_name] for _, _, grads_of in expected]
                if parts[0] is not None:
                    assert torch.equal(parts[0] + parts[1], parameter.grad), (name, parameter_name)

    def test_without_gradient(self) -> None:
        """Under ``torch.no_grad()`` and in eval mode the plan's output is the layer's."""
        layer = _layer(replace(by_name("alltoall-dropout-ep1"), position="none")).eval()
        x = _input().detach()
        with torch.no_grad():
            expected, _ = layer(hidden_states=x, attention_mask=None)
            assert torch.equal(expected, SlotRun(LayerPlan.build(layer)).forward(x))

    def test_gradients_accumulate(self) -> None:
        """Into a gradient that is there already, as plain backward does."""
        layer = _layer(replace(_MOE, position="none"))
        x, grad = _input(), torch.ones(6, 2, 32)
        plan = LayerPlan.build(layer)
        before = {name: torch.randn_like(p) for name, p in layer.named_parameters()}
        found = []
        for run in (
            lambda: layer(hidden_states=x, attention_mask=None)[0].backward(grad),
            lambda: _once(plan, x, grad),
        ):
            for name, parameter in layer.named_parameters():
                parameter.grad = before[name].clone()
            run()
            found.append({name: p.grad for name, p in layer.named_parameters()})
        assert_equal_gradients(found[0], found[1])


def _once(plan: LayerPlan, x: Tensor, grad: Tensor) -> None:
    run = SlotRun(plan)
    run.forward(x)
    run.backward(grad)


def _live_tensors() -> dict[int, Tensor]:
    """Every tensor that Python knows, but for the generator states that Megatron's tracker replaces at each fork."""
    # By type: isinstance would wake lazy module attributes, which warn.
    tracked = {id(state) for state in get_cuda_rng_tracker().get_states().values()}
    live = [value for value in gc.get_objects() if issubclass(type(value), Tensor)]
    return {id(value): value for value in live if id(value) not in tracked}


def _survivors(before: Mapping[int, Tensor], x: Tensor) -> list[tuple[int, ...]]:
    """Shapes of the tensors that were not there before, gradients of parameters and of ``x`` aside."""
    live = [t for i, t in _live_tensors().items() if i not in before and not isinstance(t, nn.Parameter)]
    return [tuple(t.shape) for t in live if t is not x.grad]


def _wait_for_gloo(is_done: Callable[[], bool]) -> None:
    """Gloo's thread may hold a collective's tensors for a moment after it has told us that it is done."""
    deadline = time.monotonic() + 5
    while not is_done() and time.monotonic() < deadline:
        time.sleep(0.01)


def _attributes(layer: Any) -> dict[str, Any]:
    """Everything that hangs on the layer, its modules, dispatcher and communication manager."""
    holders = {f"module {name}": module for name, module in layer.named_modules()}
    for name, module in layer.named_modules():
        dispatcher = getattr(module, "token_dispatcher", None)
        if dispatcher is not None:
            holders[f"dispatcher of {name}"] = dispatcher
            manager = dispatcher.__dict__.get("_comm_manager")
            if manager is not None:
                holders[f"manager of {name}"] = manager
    found: dict[str, Any] = {}
    for holder, value in holders.items():
        found |= {f"{holder}.{key}": item for key, item in value.__dict__.items()}
    return found


class TestNothingIsLeft:
    """After a microbatch no tensor of it lives, and nothing on the layer has changed."""

    @pytest.mark.parametrize("proving", [False, True], ids=["by-name", "on-proof"])
    @pytest.mark.parametrize(
        "name",
        [
            *(
                "alltoall-moe-ep1",
                "allgather-shared-gate-ep1",
                "shared-overlap-ep1",
                "recompute-all-ep1",
                "hybridep-ep1",
            ),
            *("latent-shared-ep1", "drop-pad-ep1", "dense-recompute-mlp-norm", "expert-bias-ep1", "grouped-ep1"),
            *("alltoall-recompute-moe_act-ep1",),
        ],
    )
    def test_no_tensor_survives(self, name: str, proving: bool) -> None:
        """Counted among all objects with ``gc`` off: only the parameters' gradients are new, in every microbatch."""
        layer = _layer(replace(by_name(name), position="none"))
        plan = LayerPlan.build(layer)
        x, grad = _input(), torch.ones(6, 2, 32)
        for p in layer.parameters():
            p.grad = torch.zeros_like(p)
        _once(plan, x, grad)  # whatever the plain model makes once and keeps (buffers, masks)
        x.grad = None
        gc.collect()
        gc.disable()
        try:
            for _ in range(3):
                before = _live_tensors()
                attributes = _attributes(layer)
                references = _run_and_watch(plan, x, grad, proving=proving)
                _wait_for_gloo(lambda references=references: all(one() is None for _, one in references))
                assert [kind for kind, reference in references if reference() is not None] == []
                _wait_for_gloo(lambda before=before: not _survivors(before, x))
                assert _survivors(before, x) == []
                x.grad = None
                changed = {key for key, value in _attributes(layer).items() if attributes.get(key, None) is not value}
                # The wrapper that Megatron-Core makes for each microbatch's weight gradients.
                assert {key for key in changed if not key.endswith("backward_dw_wrapper")} == set()
        finally:
            gc.enable()

    @pytest.mark.parametrize("name", ["alltoall-moe-ep1", "shared-overlap-ep1", "dense"])
    def test_forward_only(self, name: str) -> None:
        """Evaluation without gradients leaves nothing behind either, not even in a plan that never ran backward."""
        layer = _layer(replace(by_name(name), position="none")).eval()
        plan = LayerPlan.build(layer)
        x = _input().detach()
        with torch.no_grad():
            layer(hidden_states=x, attention_mask=None)  # makes Megatron's global buffer for attention scores
            gc.collect()
            gc.disable()
            try:
                before = _live_tensors()
                SlotRun(plan).forward(x)
                _wait_for_gloo(lambda before=before: not _live_tensors().keys() - before.keys())
                survivors = [t for i, t in _live_tensors().items() if i not in before]
                assert [(tuple(t.shape), t.dtype) for t in survivors] == []
            finally:
                gc.enable()


def _run_and_watch(plan: LayerPlan, x: Tensor, grad: Tensor, *, proving: bool) -> list[tuple[str, Any]]:
    """Run one microbatch and return weak references to everything that passed between its slots."""
    run = SlotRun(plan, proving=proving)
    references: list[tuple[str, Any]] = [("layer state", weakref.ref(run.layer_state))]
    for slot, output in zip(run.nodes, run.steps(x), strict=True):
        for tensor in output if isinstance(output, tuple) else (output,):
            references.append((f"output of {slot}", weakref.ref(tensor)))
    references += [(f"input of {slot}", weakref.ref(t)) for slot, node in run.nodes.items() for t in node.inputs]
    references += [(f"handoff of {slot}", weakref.ref(t)) for slot, node in run.nodes.items() for t in node.detached]
    del output, tensor
    run.backward(grad)
    return references


class _GatedPreDispatch(PreDispatchNode):
    """Leaves a gate for combine: a differentiable handoff of a user's own."""

    writes: ClassVar[HandoffMap] = {**PreDispatchNode.writes, "gate": Tensor}

    def __init__(self, layer: Any, *, gate: nn.Linear) -> None:
        super().__init__(layer)
        self._gate = gate

    def forward(self, ctx: NodeContext, *inputs: Tensor) -> Tensor | tuple[Tensor, ...]:
        self.put(ctx, "gate", self._gate(inputs[0]).sigmoid())
        return super().forward(ctx, *inputs)


class _GatedCombine(CombineNode):
    reads: ClassVar[HandoffMap] = {**CombineNode.reads, "gate": Tensor}

    def forward(self, ctx: NodeContext, *inputs: Tensor) -> Tensor | tuple[Tensor, ...]:
        gate = self.take(ctx, "gate")
        output = super().forward(ctx, *inputs)
        assert isinstance(gate, Tensor)
        assert isinstance(output, Tensor)
        return output * gate


class _ScaledCombine(CombineNode):
    """Combine, then scale the layer's output by a fixed factor."""

    def __init__(self, layer: Any, *, scale: float) -> None:
        super().__init__(layer)
        self._scale = scale

    def forward(self, ctx: NodeContext, *inputs: Tensor) -> Tensor:
        output = super().forward(ctx, *inputs)
        assert isinstance(output, Tensor)
        return output * self._scale


class _OwnExperts(ScheduleNode):
    """In place of the experts' slot: the library's own node, run inside one of the user's."""

    slot = M
    stream = StreamType.COMPUTE
    reads = ExpertNode.reads
    writes = ExpertNode.writes

    def __init__(self, layer: Any) -> None:
        self._parts = ExpertNode(layer)._parts

    def forward(self, ctx: NodeContext, *inputs: Tensor) -> Tensor:
        layer_pass: Any = self.take(ctx, "pass_to_mlp")
        probs = self.take(ctx, "dispatched_probs")
        assert isinstance(probs, Tensor)
        output = self._parts.experts(layer_pass, inputs[0], probs)
        self.put(ctx, "pass_to_combine", layer_pass)
        return output.tanh()


class TestSubclasses:
    """A user's node in place of a slot; everything else stays."""

    @pytest.mark.parametrize("proving", [False, True], ids=["by-name", "on-proof"])
    def test_overridden_forward_with_a_parameter(self, proving: bool) -> None:
        """A factory with a parameter: the layer's output, scaled."""
        layer = _layer(replace(by_name("alltoall-shared-ep1"), position="none"))
        plan = LayerPlan.build(layer, nodes={C: lambda it: _ScaledCombine(it, scale=0.5)})
        assert repr(plan.nodes[C]).startswith("<")
        x, grad = _input(), torch.randn(6, 2, 32)
        expected = _plain_function(layer, lambda: layer(hidden_states=x, attention_mask=None)[0] * 0.5, x, grad)
        _assert_same(expected, _through(plan, x, grad, proving=proving))

    @pytest.mark.parametrize("proving", [False, True], ids=["by-name", "on-proof"])
    def test_added_handoff(self, proving: bool) -> None:
        """Its gradient flows back through its writer, into the gate's weight and the layer's input."""
        layer = _layer(replace(by_name("alltoall-shared-ep1"), position="none"))
        layer.gate = nn.Linear(32, 1)
        nodes = {P: lambda it: _GatedPreDispatch(it, gate=layer.gate), C: _GatedCombine}
        plan = LayerPlan.build(layer, nodes=nodes)
        x, grad = _input(), torch.randn(6, 2, 32)

        def gated() -> Tensor:
            gate = layer.gate(x).sigmoid()
            return layer(hidden_states=x, attention_mask=None)[0] * gate

        expected = _plain_function(layer, gated, x, grad)
        _assert_same(expected, _through(plan, x, grad, proving=proving))

    @pytest.mark.parametrize("proving", [False, True], ids=["by-name", "on-proof"])
    def test_replaced_slot(self, proving: bool, monkeypatch: pytest.MonkeyPatch) -> None:
        """A node of the user's own class in a slot of the layer; compared with the plain layer so changed."""
        layer = _layer(replace(by_name("alltoall-moe-ep1"), position="none"))
        plan = LayerPlan.build(layer, nodes={M: _OwnExperts})
        x, grad = _input(), torch.randn(6, 2, 32)
        actual = _through(plan, x, grad, proving=proving)
        original = type(layer.mlp).routed_experts_compute
        monkeypatch.setattr(
            type(layer.mlp),
            "routed_experts_compute",
            lambda self, *args: (original(self, *args)[0].tanh(), None),
        )
        expected = _plain_function(layer, lambda: layer(hidden_states=x, attention_mask=None)[0], x, grad)
        _assert_same(expected, actual)

    def test_the_layer_is_not_changed(self) -> None:
        """Building plans, with nodes of one's own too, leaves the layer as it was."""
        layer = _layer()
        before = _attributes(layer)
        LayerPlan.build(layer, nodes={C: lambda it: _ScaledCombine(it, scale=2.0)}).describe()
        assert {k for k, v in _attributes(layer).items() if before.get(k) is not v} <= {"module .backward_dw_wrapper"}


def _plain_function(
    layer: Any, function: Callable[[], Tensor], x: Tensor, grad: Tensor
) -> tuple[Tensor, Tensor | None, Mapping[str, Tensor | None]]:
    outputs = []

    def run() -> None:
        output = function()
        outputs.append(output.detach())
        output.backward(grad)

    grads = take_gradients(layer, run)
    input_grad, x.grad = x.grad, None
    return outputs[0], input_grad, grads


def _assert_same(expected: Any, actual: Any) -> None:
    assert torch.equal(expected[0], actual[0])
    assert torch.equal(expected[1], actual[1])
    assert_equal_gradients(expected[2], actual[2])


def _misfit(slot: Slot, **declared: Any) -> Any:
    namespace = {"slot": slot, "stream": StreamType.COMPUTE, "forward": lambda self, ctx, x: x, **declared}
    return type("Misfit", (ScheduleNode,), namespace)


class _Alone(ScheduleNode):
    """Holds a parameter, and not the module whose it is."""

    slot, stream = M, StreamType.COMPUTE

    def __init__(self, layer: torch.nn.Linear) -> None:
        self.weight = layer.weight

    def forward(self, ctx: NodeContext, *inputs: torch.Tensor) -> torch.Tensor:
        return inputs[0] @ self.weight


class _WithModule(_Alone):
    def __init__(self, layer: torch.nn.Linear) -> None:
        self.layer = layer
        super().__init__(layer)


@pytest.mark.parametrize("node", [_Alone, _WithModule])
def test_a_parameter_that_no_node_holds_is_told(node: type[ScheduleNode], caplog: pytest.LogCaptureFixture) -> None:
    """Its gradient cannot be deferred; with weight gradients off nobody needs to know."""
    LayerPlan.build(torch.nn.Linear(2, 2, bias=False), nodes={M: node})
    assert not caplog.records
    LayerPlan.build(torch.nn.Linear(2, 2, bias=False), nodes={M: node}, wgrad="auto")
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == (node is _Alone)
    assert all("no node's modules() hold weight, whose gradients therefore come with B" in text for text in told)


class _Hook:
    def backward_dw(self) -> None:
        """Nothing."""

    def parameters(self) -> tuple[Any, ...]:
        return ()


class TestRefusals:
    """What does not fit together is refused when the plan is built, with a message that says what to change."""

    @pytest.mark.parametrize(
        ("nodes", "message"),
        [
            (
                {M: _misfit(M)()},
                r"nodes\[Slot.MLP\] is a Misfit, made already; give the class, Misfit, or a function",
            ),
            (
                {M: _misfit(C)},
                r"nodes\[Slot.MLP\] is Misfit, which is a node for moe_combine; put it under its own slot",
            ),
            ({POST: MTPPostNode}, r"TransformerLayer \(moe\) has no slot 'mtp_post_process' to put MTPPostNode into"),
            ({M: torch.nn.Linear}, r"nodes\[Slot.MLP\] is the class Linear, which is no ScheduleNode; derive it from"),
            ({"mlp": ExpertNode}, r"nodes has the key 'mlp'; use a Slot, one of Slot.PRE_DISPATCH_COMPUTATION"),
            ({M: 3}, r"nodes\[Slot.MLP\] is 3; give a node class or a callable that takes the layer"),
            (
                {M: lambda layer: "node"},
                r"nodes\[Slot.MLP\] made 'node' for TransformerLayer; it must return a Schedule",
            ),
            (
                {M: _misfit(M, reads={"gate_scores": Tensor})},
                r"Misfit reads 'gate_scores', which no earlier slot of this layer writes; let an earlier node declare",
            ),
            (
                {C: _GatedCombine},
                r"_GatedCombine reads 'gate', which no earlier slot of this layer writes",
            ),
            (
                {P: lambda it: _GatedPreDispatch(it, gate=nn.Linear(1, 1))},
                r"_GatedPreDispatch writes 'gate', which no later slot of this layer reads; it would never be freed",
            ),
            (
                {M: _misfit(M, reads=ExpertNode.reads, writes={**ExpertNode.writes, "residual": Tensor})},
                r"Misfit and PreDispatchNode both write 'residual'; rename one of them",
            ),
            (
                {M: _misfit(M, reads={**ExpertNode.reads, "residual": Tensor}, writes=ExpertNode.writes)},
                r"CombineNode and Misfit both read 'residual'; a handoff is taken once",
            ),
            ({M: _misfit(M, writes=ExpertNode.writes)}, r"writes '.*', which no later slot of this layer reads"),
        ],
    )
    def test_plan_errors(self, nodes: Any, message: str) -> None:
        """Each is a PlanError, which is a ValueError."""
        with pytest.raises(PlanError, match=message) as caught:
            LayerPlan.build(_layer(), nodes=nodes)
        assert isinstance(caught.value, LayerNodesError)
        assert isinstance(caught.value, ValueError)

    @pytest.mark.parametrize(
        ("slot", "base", "declared", "message"),
        [
            (
                P,
                PreDispatchNode,
                {"writes": {"gate": Tensor}},
                r"Forgetful declares 'writes' without those of its base PreDispatchNode: pass_to_dispatch, residual, "
                r"shared_expert_output are missing, which later slots read; declare writes = "
                r"\{\*\*PreDispatchNode.writes, 'gate': ...\}",
            ),
            (
                P,
                PreDispatchNode,
                {"writes": {"residual": Tensor, "pass_to_dispatch": object}},
                r"Forgetful declares 'writes' without those of its base PreDispatchNode: shared_expert_output is mis",
            ),
            (
                C,
                CombineNode,
                {"reads": {"residual": Tensor}},
                r"Forgetful declares 'reads' without those of its base CombineNode: pass_to_combine, "
                r"shared_expert_output are missing, which earlier slots write; declare reads = "
                r"\{\*\*CombineNode.reads, 'residual': ...\}",
            ),
        ],
    )
    def test_a_subclass_that_forgets_its_base_s_handoffs(
        self, slot: Slot, base: type[ScheduleNode], declared: Any, message: str
    ) -> None:
        """The subclass is named, also where one of it inherits, and not the node that misses the handoff."""
        forgetful = type("Forgetful", (base,), declared)
        for node in (forgetful, type("Child", (forgetful,), {})):
            with pytest.raises(PlanError, match=message):
                LayerPlan.build(_layer(), nodes={slot: node})

    def test_the_split_combine_leaves_handoffs_to_the_slot_after_it(self) -> None:
        """``CombineExchangeNode`` drops its base's on purpose: what replaces ``PostCombineNode`` is told of them."""
        own = _misfit(Slot.POST_COMBINE, reads={"pass_to_post_combine": object})
        with pytest.raises(PlanError, match="PreDispatchNode writes '.*', which no later slot of this layer reads"):
            LayerPlan.build(_layer(), nodes={Slot.POST_COMBINE: own}, split_combine=True)

    @pytest.mark.parametrize(
        ("hook", "message"),
        [
            (
                nn.Linear(2, 2),
                r"Hooked.wgrad_hook\(\) returned Linear, which has no 'backward_dw'; return an object with "
                r"backward_dw\(\).*and parameters\(\)",
            ),
            (object(), r"returned object, which has no 'backward_dw' and no 'parameters'"),
            (nn.Linear, r"returned the class Linear; return an object of it, made anew at each call"),
            ([_Hook()], r"returned list, which has no 'backward_dw'"),
        ],
    )
    def test_a_hook_that_cannot_be_called(self, hook: Any, message: str) -> None:
        """Found when a plan with deferral is built; without it no hook is asked for."""
        node = _misfit(M, wgrad_hook=lambda self: hook)
        node.__name__ = "Hooked"
        with pytest.raises(PlanError, match=message):
            LayerPlan.build(nn.Linear(2, 2), nodes={M: node}, wgrad="auto")
        LayerPlan.build(nn.Linear(2, 2), nodes={M: lambda layer: node()})

    def test_a_dense_layer_has_no_dispatch(self) -> None:
        """A dispatch node for a dense layer names the slots that it has."""
        with pytest.raises(
            PlanError, match=r"\(dense\) has no slot 'moe_dispatch' to put DispatchNode into; its slots"
        ):
            LayerPlan.build(_layer(by_name("dense")), nodes={D: DispatchNode})

    def test_not_a_layer(self) -> None:
        """A module that is not Megatron's needs nodes."""
        with pytest.raises(
            UnsupportedLayerError, match=r"Linear is no TransformerLayer .*LayerPlan.build\(layer, nodes="
        ):
            LayerPlan.build(nn.Linear(2, 2))

    def test_an_unknown_wgrad(self) -> None:
        """The message lists what there is."""
        with pytest.raises(OptionError, match="unknown wgrad='on'; choose one of 'auto', 'off'"):
            LayerPlan.build(_layer(), wgrad="on")

    def test_a_node_over_a_foreign_layer(self) -> None:
        """The library's nodes run Megatron's layers only."""
        with pytest.raises(UnsupportedLayerError, match="Linear is no TransformerLayer"):
            LayerPlan.build(nn.Linear(2, 2), nodes={M: ExpertNode})

    def test_mtp_post_outside_mtp(self) -> None:
        """The MTP node names what it needs."""
        with pytest.raises(
            UnsupportedLayerError, match="MTPPostNode needs a MultiTokenPredictionLayer, found Transformer"
        ):
            MTPPostNode(_layer())

    def test_plans_are_immutable(self) -> None:
        """Neither attributes nor the mapping of nodes can be changed."""
        plan = LayerPlan.build(_layer())
        with pytest.raises(
            AttributeError, match="LayerPlan is immutable; build another plan instead of setting 'nodes'"
        ):
            plan.nodes = {}
        with pytest.raises(TypeError):
            plan.nodes[M] = None  # type: ignore[index]


def test_a_layer_of_ones_own() -> None:
    """Any module, with a node for every slot that it uses; the rest pass through."""

    class Double(ScheduleNode):
        slot = M
        stream = StreamType.COMPUTE

        def __init__(self, layer: nn.Linear) -> None:
            self._layer = layer

        def forward(self, ctx: NodeContext, *inputs: Tensor) -> Tensor:
            output: Tensor = self._layer(inputs[0])
            return output * 2

    layer = nn.Linear(3, 3)
    plan = LayerPlan.build(layer, nodes={M: Double})
    assert list(plan.nodes) == [M]
    x = torch.randn(2, 3, requires_grad=True)
    grad = torch.randn(2, 3)
    _assert_same(_plain_function(layer, lambda: layer(x) * 2, x, grad), _through(plan, x * 1.0, grad))


def test_chunk_state_needs_no_model() -> None:
    """A layer alone, without the chunk that it belongs to, runs: no final norm, no decoder call."""
    layer = _layer(replace(_MOE, position="none"))
    run = SlotRun(LayerPlan.build(layer), state=chunk_state(), is_first_layer=True, is_last_layer=True)
    expected, _ = layer(hidden_states=_input(), attention_mask=None)
    assert torch.equal(expected, run.forward(_input()))
