"""The node base class: declarations, handoffs, and one node object shared by microbatches."""

from __future__ import annotations

import functools
import itertools
from abc import abstractmethod
from collections.abc import Iterator
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from layernodes import (
    ChunkPlan,
    CombineNode,
    DispatchNode,
    ExpertNode,
    ExtraSlot,
    LayerNodesError,
    LayerPlan,
    MTPPostNode,
    NodeDefinitionError,
    NodeStateError,
    PreDispatchNode,
    Runner,
    ScheduleNode,
    Slot,
    StepError,
    StreamType,
    schedules,
)
from layernodes.state import HandoffMap, NodeContext, handoffs_of
from tests.support.fixtures import MEGATRON_WORLD, megatron_world  # noqa: F401
from tests.support.slots import SlotRun

pytestmark = MEGATRON_WORLD

P, D, M, C = Slot.PRE_DISPATCH_COMPUTATION, Slot.MOE_DISPATCH, Slot.MLP, Slot.MOE_COMBINE


def _define(name: str, bases: tuple[type, ...] = (ScheduleNode,), **namespace: Any) -> type[ScheduleNode]:
    """Define a node class; a forward that passes its input on unless given."""
    namespace = {"forward": lambda self, ctx, x: x, **namespace}
    return type(name, bases, {key: value for key, value in namespace.items() if value is not None})


def _node(name: str, slot: Slot, forward: Any, **declarations: Any) -> Any:
    """A factory of a node in ``slot`` that runs ``forward(node, ctx, *inputs)``."""
    cls = _define(name, slot=slot, stream=StreamType.COMPUTE, forward=forward, **declarations)
    return lambda layer: cls()


def _forward_with_scale(self: Any, ctx: Any, x: Any, *, scale: Any) -> Any:
    return x * scale


class TestDefinition:
    """What is wrong is refused when the class is defined."""

    @pytest.mark.parametrize(
        ("namespace", "message"),
        [
            (
                {"stream": StreamType.COMM},
                r"MyNode\(ScheduleNode\) declares no 'slot'; declare one of Slot.PRE_DISPATCH",
            ),
            (
                {"slot": P},
                r"MyNode\(ScheduleNode\) declares no 'stream'; declare StreamType.COMPUTE or StreamType.COMM",
            ),
            ({"slot": "mlp", "stream": StreamType.COMM}, r"declares slot = 'mlp'; declare one of"),
            ({"slot": P, "stream": "comm"}, r"declares stream = 'comm'; declare StreamType.COMPUTE"),
            ({"slot": P, "stream": StreamType.COMM, "reads": ["x"]}, r"declares reads = \['x'\]; declare a mapping"),
            ({"slot": P, "stream": StreamType.COMM, "writes": "x"}, r"declares writes = 'x'; declare a mapping"),
            (
                {"slot": P, "stream": StreamType.COMM, "writes": {"x": "Tensor"}},
                r"declares writes 'x': 'Tensor'; declare a name and a type, e.g. 'gate_scores': Tensor",
            ),
            ({"slot": P, "stream": StreamType.COMM, "reads": {3: Tensor}}, r"declares reads 3: .*declare a name"),
            (
                {"slot": P, "stream": StreamType.COMM, "reads": {"x": Tensor}, "writes": {"x": Tensor}},
                r"declares x in both 'reads' and 'writes'; a handoff is written once",
            ),
            (
                {"slot": P, "stream": StreamType.COMM, "forward": lambda self: None},
                r"forward takes \(self\); declare forward\(self, ctx, \*inputs\)",
            ),
            (
                {"slot": P, "stream": StreamType.COMM, "forward": lambda self, x: x},
                r"forward takes \(self, x\); declare forward\(self, ctx, \*inputs\): the microbatch's context, t",
            ),
            (
                {"slot": P, "stream": StreamType.COMM, "forward": staticmethod(lambda x: x)},
                r"forward takes \(x\); declare forward\(self, ctx, \*inputs\)",
            ),
            (
                {"slot": P, "stream": StreamType.COMM, "forward": _forward_with_scale},
                r"forward takes \(self, ctx, x, \*, scale\); .*give 'scale' a default, or take it in __init__",
            ),
            ({"slot": P, "stream": StreamType.COMM, "forward": 3}, r"forward is 3; declare forward\(self, ctx, \*inp"),
        ],
    )
    def test_wrong_declarations(self, namespace: dict[str, Any], message: str) -> None:
        """Each names the class, what it declares, and what to declare."""
        with pytest.raises(NodeDefinitionError, match=message) as caught:
            _define("MyNode", **namespace)
        assert isinstance(caught.value, LayerNodesError)
        assert isinstance(caught.value, TypeError)

    @pytest.mark.parametrize("verb", ["put", "take", "__call__"])
    @pytest.mark.parametrize("base", [ScheduleNode, DispatchNode, CombineNode])
    def test_final_verbs(self, verb: str, base: type) -> None:
        """The verbs cannot be overridden, whatever the base."""
        with pytest.raises(
            NodeDefinitionError, match=f"MyNode.* overrides '{verb}', which is final; override 'forward'"
        ):
            _define("MyNode", (base,), **{verb: lambda self, *args: None})

    def test_abstract_classes_need_no_declarations(self) -> None:
        """A base class with an abstract method may leave slot and stream to its subclasses, which are then checked."""
        base = _define("Base", forward=None)
        with pytest.raises(NodeDefinitionError, match="declares no 'slot'"):
            _define("Child", (base,))
        child = _define("Child", (base,), slot=M, stream=StreamType.COMPUTE)
        assert child().slot is M

    @pytest.mark.parametrize(
        "forward",
        [
            lambda self, ctx, x: x,
            lambda self, ctx, x, y=None: x,
            lambda self, ctx, *inputs: inputs[0],
            lambda self, *given: given[1],
            lambda *given: given[2],
            lambda self, ctx, x, *, scale=1.0, **more: x * scale,
            staticmethod(lambda ctx, x: x),
            classmethod(lambda cls, ctx, x: x),
            functools.partialmethod(_forward_with_scale, scale=1.0),
            torch.no_grad()(lambda self, ctx, x: x),
        ],
    )
    def test_forwards_that_can_be_called(self, forward: Any) -> None:
        """Every way to write one that takes a context and an input."""
        node = _define("MyNode", slot=M, stream=StreamType.COMPUTE, forward=forward)
        plan = LayerPlan.build(nn.Linear(2, 2), nodes={M: lambda layer: node()})
        assert SlotRun(plan).forward(torch.ones(2)).tolist() == [1.0, 1.0]

    @pytest.mark.parametrize("make", [lambda cls: cls, lambda cls: lambda layer: cls()])
    def test_a_class_without_forward(self, make: Any) -> None:
        """It may be a base class, so it is told when a node is made of it, by the plan or by a factory."""
        base = _define("Unfinished", forward=None, slot=M, stream=StreamType.COMPUTE)
        with pytest.raises(NodeDefinitionError, match=r"Unfinished\(ScheduleNode\) has no 'forward'; write def for"):
            LayerPlan.build(nn.Linear(2, 2), nodes={M: make(base)})

    def test_a_base_class_with_an_abstract_method_of_its_own(self) -> None:
        """What is missing is named; a subclass that has it is a node."""
        base = _define("Base", scale=abstractmethod(lambda self: 1.0), slot=M, stream=StreamType.COMPUTE)
        with pytest.raises(NodeDefinitionError, match=r"Base\(ScheduleNode\) has no 'scale'; write it in a subclass"):
            base()
        assert _define("Child", (base,), scale=lambda self: 2.0)().slot is M

    def test_declarations_are_inherited(self) -> None:
        """A subclass of a node class keeps slot, stream, reads and writes."""
        child = _define("Child", (CombineNode,))
        assert (child.slot, child.stream, child.reads) == (C, StreamType.COMM, CombineNode.reads)

    def test_an_extra_slot_is_a_slot(self) -> None:
        """A user's own slot is declared by an ``ExtraSlot``."""
        slot = ExtraSlot(name="measure", after=M)
        assert _define("Own", slot=slot, stream=StreamType.COMPUTE).slot == slot

    def test_init_of_a_subclass_need_not_call_super(self) -> None:
        """The verbs work on a node whose ``__init__`` forgot ``super().__init__()``."""

        class Forgetful(ScheduleNode):
            slot = M
            stream = StreamType.COMPUTE

            def __init__(self) -> None:
                self.scale = 2.0

            def forward(self, ctx: NodeContext, *inputs: Tensor) -> Tensor:
                return inputs[0] * self.scale

        plan = LayerPlan.build(nn.Linear(2, 2), nodes={M: lambda layer: Forgetful()})
        assert SlotRun(plan).forward(torch.ones(2)).tolist() == [2.0, 2.0]

    def test_the_five_classes_and_their_slots(self) -> None:
        """Slot and stream of the library's own classes are the table's of the design."""
        table = [(n.slot, n.stream) for n in (PreDispatchNode, DispatchNode, ExpertNode, CombineNode, MTPPostNode)]
        compute, comm = StreamType.COMPUTE, StreamType.COMM
        assert table == [(P, compute), (D, comm), (M, compute), (C, comm), (Slot.MTP_POST_PROCESS, compute)]


class TestHandoffs:
    """Each handoff has a type, one writer and one taker; everything else is an error that says what to do."""

    def _run(self, first: Any, second: Any, **declared: Any) -> Any:
        plan = LayerPlan.build(
            nn.Linear(2, 2),
            nodes={
                P: _node("Writer", P, first, writes=declared.get("writes", {"x": Tensor})),
                M: _node("Reader", M, second, reads=declared.get("reads", {"x": Tensor})),
            },
        )
        return SlotRun(plan).forward(torch.ones(2, requires_grad=True))

    @staticmethod
    def _put(node: Any, ctx: Any, x: Tensor) -> Tensor:
        node.put(ctx, "x", x * 2)
        return x

    @staticmethod
    def _take(node: Any, ctx: Any, x: Tensor) -> Tensor:
        return x + node.take(ctx, "x")

    def test_a_handoff_arrives(self) -> None:
        """What is put is what is taken."""
        assert self._run(self._put, self._take).tolist() == [3.0, 3.0]

    def test_undeclared_put(self) -> None:
        """Writing a name that is not in ``writes``."""

        def forward(node: Any, ctx: Any, x: Tensor) -> Tensor:
            node.put(ctx, "y", x)
            return x

        with pytest.raises(
            NodeStateError, match=r"Writer writes 'y', which it does not declare; add it to its 'writes'"
        ):
            self._run(forward, self._take)

    def test_undeclared_take(self) -> None:
        """Taking a name that is not in ``reads``."""

        def forward(node: Any, ctx: Any, x: Tensor) -> Any:
            return node.take(ctx, "y")

        with pytest.raises(NodeStateError, match=r"Reader takes 'y', which it does not declare; add it to its 'reads'"):
            self._run(self._put, forward)

    def test_wrong_type(self) -> None:
        """Writing another type than declared."""

        def forward(node: Any, ctx: Any, x: Tensor) -> Tensor:
            node.put(ctx, "x", 3)
            return x

        with pytest.raises(NodeStateError, match="Writer writes 'x' as int, declared as Tensor"):
            self._run(forward, self._take)

    def test_types_that_disagree(self) -> None:
        """Reader and writer declare different types."""
        with pytest.raises(
            NodeStateError, match=r"Reader takes 'x' as int, but it was written as Tensor; declare the same"
        ):
            self._run(self._put, self._take, reads={"x": int})

    def test_an_optional_handoff(self) -> None:
        """A union admits None, which must still be put."""

        def put_none(node: Any, ctx: Any, x: Tensor) -> Tensor:
            node.put(ctx, "x", None)
            return x

        def take(node: Any, ctx: Any, x: Tensor) -> Tensor:
            assert node.take(ctx, "x") is None
            return x

        optional = {"x": Tensor | None}
        self._run(put_none, take, writes=optional, reads=optional)

    def test_second_write(self) -> None:
        """Writing one name twice."""

        def forward(node: Any, ctx: Any, x: Tensor) -> Tensor:
            self._put(node, ctx, x)
            return self._put(node, ctx, x)

        with pytest.raises(NodeStateError, match="handoff 'x' is written a second time for this layer and microbatch"):
            self._run(forward, self._take)

    def test_second_take(self) -> None:
        """Taking one name twice."""

        def forward(node: Any, ctx: Any, x: Tensor) -> Tensor:
            self._take(node, ctx, x)
            return self._take(node, ctx, x)

        with pytest.raises(NodeStateError, match="'x' has already been taken; each is taken once"):
            self._run(self._put, forward)

    def test_early_take(self) -> None:
        """Running a slot before the one that writes its handoff."""
        nodes = {
            P: _node("Writer", P, self._put, writes={"x": Tensor}),
            M: _node("Reader", M, self._take, reads={"x": Tensor}),
        }
        run = SlotRun(LayerPlan.build(nn.Linear(2, 2), nodes=nodes))
        with pytest.raises(NodeStateError, match="'x' has not been written yet; run the slot that writes it first"):
            run.nodes["mlp"].forward(torch.ones(2))

    def test_unwritten(self) -> None:
        """A forward that returns without having put what it declares."""
        with pytest.raises(NodeStateError, match=r"Writer.forward returned with declared handoffs not written: x;"):
            self._run(lambda node, ctx, x: x, self._take)

    def test_left_over(self) -> None:
        """A forward that returns without having taken what it declares."""
        with pytest.raises(NodeStateError, match=r"Reader.forward returned with declared handoffs left untaken: x;"):
            self._run(self._put, lambda node, ctx, x: x)


class TestUndeclaredTensors:
    """A tensor that requires grad and reaches a node by an undeclared way is an error, not a lost gradient."""

    def _run(self, first: Any, second: Any) -> None:
        nodes = {P: _node("First", P, first), M: _node("Second", M, second)}
        run = SlotRun(LayerPlan.build(nn.Linear(2, 2), nodes=nodes))
        run.forward(torch.ones(2, requires_grad=True) * 1.0)

    def test_a_forgotten_return(self) -> None:
        """The node that returned nothing is named, not the next one."""
        with pytest.raises(NodeStateError, match="First.forward returned None; return a tensor or a tuple of"):
            self._run(lambda node, ctx, x: None, lambda node, ctx, x: x * 1.0)

    def test_a_list_is_no_tuple(self) -> None:
        """Its tensors would not be seen, and get no gradient."""
        with pytest.raises(NodeStateError, match="First.forward returned list; return a tensor or a tuple of"):
            self._run(lambda node, ctx, x: [x * 1.0], lambda node, ctx, x: x)

    def test_through_the_layer_state(self) -> None:
        """Left on Megatron's shared bag instead of put."""

        def leave(node: Any, ctx: Any, x: Tensor) -> Tensor:
            ctx.layer_state.wide = x * 3
            return x * 5

        with pytest.raises(
            NodeStateError, match=r"Second.forward used a tensor that requires grad and is neither .*Mul"
        ):
            self._run(leave, lambda node, ctx, x: x + ctx.layer_state.wide)

    def test_the_other_slots_input(self) -> None:
        """An input of an earlier slot, which is a leaf."""

        def leave(node: Any, ctx: Any, x: Tensor) -> Tensor:
            ctx.layer_state.wide = x
            return x * 5

        with pytest.raises(
            NodeStateError, match=r"depends on input 0 of pre_dispatch_computation; its gradient would be"
        ):
            self._run(leave, lambda node, ctx, x: x + ctx.layer_state.wide)

    @pytest.mark.parametrize("forward", [2, 4, 8])
    def test_a_way_that_opens_later(self, forward: int) -> None:
        """Nothing undeclared in the first forward; later ones are looked at too, ever more seldom."""
        count = 0

        def leave(node: Any, ctx: Any, x: Tensor) -> Tensor:
            ctx.layer_state.wide = x * 3
            return x * 5

        def look(node: Any, ctx: Any, x: Tensor) -> Tensor:
            return x + ctx.layer_state.wide if count == forward else x * 1.0

        plan = LayerPlan.build(nn.Linear(2, 2), nodes={P: _node("First", P, leave), M: _node("Second", M, look)})
        for count in range(1, forward):  # noqa: B007 - look reads it
            SlotRun(plan).forward(torch.ones(2, requires_grad=True) * 1.0)
        count = forward
        with pytest.raises(NodeStateError, match=r"Second.forward used a tensor that requires grad and is neither"):
            SlotRun(plan).forward(torch.ones(2, requires_grad=True) * 1.0)

    @pytest.mark.parametrize("streams", ["inline", "threads"])
    def test_from_the_other_thread(self, streams: str) -> None:
        """A thread numbers the functions that it records by itself: a new one's numbers are below all others."""
        kept: list[Tensor] = []
        linear = nn.Linear(2, 2)

        def leave(node: Any, ctx: Any, x: Tensor) -> Tensor:
            kept.append(linear(x).exp())
            return kept[0] * 5

        send = _define("Send", slot=D, stream=StreamType.COMM, forward=lambda node, ctx, x: x + kept[0])
        nodes = {P: _node("First", P, leave), D: lambda _: send()}
        chunk = ChunkPlan.of([LayerPlan.build(linear, nodes=nodes)])
        with Runner(streams) as runner, pytest.raises(StepError, match="F0.L0.moe_dispatch raised NodeStateError.*Exp"):
            runner.run(schedules.serial(chunk.shape, 1), chunk, [torch.ones(2)])

    def test_through_a_closure(self) -> None:
        """Kept by the node's owner."""
        kept: list[Tensor] = []

        def leave(node: Any, ctx: Any, x: Tensor) -> Tensor:
            kept.append(x.exp())
            return x * 5

        with pytest.raises(
            NodeStateError, match="Let the slot that makes the tensor declare it in 'writes' and put it"
        ):
            self._run(leave, lambda node, ctx, x: x * kept[0])

    def test_it_stays_an_error(self) -> None:
        """The next microbatch on the same node is refused too."""

        def leave(node: Any, ctx: Any, x: Tensor) -> Tensor:
            ctx.layer_state.wide = x * 3
            return x * 5

        nodes = {P: _node("First", P, leave), M: _node("Second", M, lambda node, ctx, x: x + ctx.layer_state.wide)}
        plan = LayerPlan.build(nn.Linear(2, 2), nodes=nodes)
        for _ in range(2):
            with pytest.raises(NodeStateError, match=r"Second.forward used a tensor"):
                SlotRun(plan).forward(torch.ones(2, requires_grad=True) * 1.0)

    def test_a_parameter_and_a_constant_are_no_trouble(self) -> None:
        """Parameters of any module, and tensors that require no grad, may be used freely."""
        weight = nn.Parameter(torch.ones(2))
        self._run(lambda node, ctx, x: x * weight, lambda node, ctx, x: x * weight + torch.ones(2))


class TestCases:
    """Small inputs of real faults (gradients across node boundaries, state shared by microbatches)."""

    def test_second_differentiable_output(self) -> None:
        """A handoff's gradient flows back through its writer: dL/da = 10.6, not 10.0."""
        a = nn.Parameter(torch.tensor(3.0, dtype=torch.float64))

        def write(node: Any, ctx: Any, x: Tensor) -> Tensor:
            wide = a * x
            node.put(ctx, "wide", wide)
            return 5.0 * wide

        nodes = {
            P: _node("Writer", P, write, writes={"wide": Tensor}),
            M: _node("Reader", M, lambda node, ctx, x: x + 0.3 * node.take(ctx, "wide"), reads={"wide": Tensor}),
        }
        run = SlotRun(LayerPlan.build(nn.Identity(), nodes=nodes))
        x = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
        run.forward(x * 1.0)
        run.backward(torch.ones((), dtype=torch.float64))
        assert a.grad is not None
        assert a.grad.item() == pytest.approx(10.6, abs=1e-12)

    @pytest.mark.parametrize("order", ["F0F1B0B1", "F0F1B1B0", "F0F1B0F2B1B2", "F0F1F2B2B1B0", "F0B0F1B1F2B2"])
    def test_one_node_several_microbatches(self, order: str) -> None:
        """Each microbatch gets its own gradient, in every interleaving."""
        plan = LayerPlan.build(nn.Identity(), nodes={M: _node("Sine", M, lambda node, ctx, x: x.sin())})
        inputs = [torch.tensor(value, dtype=torch.float64, requires_grad=True) for value in (0.1, 1.2, -0.7)]
        runs = [SlotRun(plan) for _ in inputs]
        found = {}
        for phase, digit in itertools.batched(order, 2):
            i = int(digit)
            if phase == "F":
                runs[i].forward(inputs[i] * 1.0)
            else:
                found[i] = runs[i].backward(torch.ones((), dtype=torch.float64)).item()
        expected = {0: 0.995004165, 1: 0.362357754, 2: 0.764842187}
        assert found == {i: pytest.approx(expected[i], abs=1e-9) for i in found}

    def test_reused_input_buffer(self) -> None:
        """The node's input is a leaf of its own each step: a hook registered on it fires once a step, 1, 1, 1, 1, 1."""
        calls = 0

        def hooked(node: Any, ctx: Any, x: Tensor) -> Tensor:
            def count(_: Tensor) -> None:
                nonlocal calls
                calls += 1

            x.register_hook(count)
            return x * 2

        plan = LayerPlan.build(nn.Identity(), nodes={M: _node("Hooked", M, hooked)})
        buffer = torch.randn(2, 3, requires_grad=True)
        per_step = []
        for _ in range(5):
            calls = 0
            run = SlotRun(plan)
            run.forward(buffer)
            run.backward(torch.ones(2, 3))
            per_step.append(calls)
        assert per_step == [1, 1, 1, 1, 1]
        assert buffer.grad is None  # the caller's buffer takes no part in the node's graph

    def test_unused_and_integer_outputs(self) -> None:
        """A float output, an integer map and an unused float output: backward works, the unused one gets none."""

        def three(node: Any, ctx: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            return x * 2, torch.tensor([1, 0]), x * 7

        nodes = {
            P: _node("Three", P, three),
            M: _node("Uses", M, lambda node, ctx, a, index, unused: a[index] * torch.tensor([3.0, 4.0])),
        }
        run = SlotRun(LayerPlan.build(nn.Identity(), nodes=nodes))
        x = torch.tensor([1.0, 2.0], requires_grad=True)
        run.forward(x * 1.0)
        grads = run.nodes["mlp"].backward(torch.ones(2))
        assert grads[1:] == (None, None)
        assert run.nodes["pre_dispatch_computation"].backward(grads).tolist() == [8.0, 6.0]

    def test_output_of_no_grad_input(self) -> None:
        """A microbatch without any gradient (frozen below) still goes backward into the parameters."""
        weight = nn.Parameter(torch.ones(2))
        nodes = {
            P: _node("Frozen", P, lambda node, ctx, x: x * 2),
            M: _node("Uses", M, lambda node, ctx, x: x * weight),
        }
        run = SlotRun(LayerPlan.build(nn.Identity(), nodes=nodes))
        run.forward(torch.tensor([1.0, 2.0]))
        run.backward(torch.ones(2))
        assert weight.grad is not None
        assert weight.grad.tolist() == [2.0, 4.0]


class _Dispatcher:
    """Keeps what it needs for the way back on itself, as Megatron's dispatchers do."""

    def dispatch(self, rows: Tensor, experts: list[int]) -> Tensor:
        self.order = torch.tensor(experts).argsort(stable=True)
        return rows[self.order]

    def combine(self, rows: Tensor) -> Tensor:
        return torch.empty_like(rows).index_copy(0, self.order, rows)


class _OwnStateDispatch(ScheduleNode):
    """Dispatch with a dispatcher for each microbatch, handed over to combine."""

    slot = D
    stream = StreamType.COMM
    writes: ClassVar[HandoffMap] = {"dispatcher": _Dispatcher}

    def __init__(self, experts: Iterator[list[int]]) -> None:
        self._experts = experts

    def forward(self, ctx: NodeContext, *inputs: Tensor) -> Tensor:
        dispatcher = _Dispatcher()
        output = dispatcher.dispatch(inputs[0], next(self._experts))
        self.put(ctx, "dispatcher", dispatcher)
        return output


class _OwnStateCombine(ScheduleNode):
    slot = C
    stream = StreamType.COMM
    reads: ClassVar[HandoffMap] = {"dispatcher": _Dispatcher}

    def forward(self, ctx: NodeContext, *inputs: Tensor) -> Tensor:
        dispatcher = self.take(ctx, "dispatcher")
        assert isinstance(dispatcher, _Dispatcher)
        return dispatcher.combine(inputs[0])


def test_dispatcher_state_of_two_microbatches() -> None:
    """Dispatch 0, dispatch 1, combine 0, combine 1: each combine returns its own input, first column 0, 2, 4, 6."""
    experts = iter([[1, 0, 1, 0], [0, 0, 1, 1]])
    nodes = {D: lambda layer: _OwnStateDispatch(experts), C: lambda layer: _OwnStateCombine()}
    plan = LayerPlan.build(nn.Identity(), nodes=nodes)
    rows = torch.arange(8.0).view(4, 2)
    steps = [SlotRun(plan).steps(rows * 1.0) for _ in range(2)]
    for _ in range(2):
        outputs = [next(step) for step in steps]
    assert [output[:, 0].tolist() for output in outputs] == [[0.0, 2.0, 4.0, 6.0]] * 2


def test_handoffs_are_empty_at_the_end() -> None:
    """After all slots of a layer nothing waits to be taken."""
    nodes = {
        P: _node("W", P, TestHandoffs._put, writes={"x": Tensor}),
        M: _node("R", M, TestHandoffs._take, reads={"x": Tensor}),
    }
    run = SlotRun(LayerPlan.build(nn.Identity(), nodes=nodes))
    run.forward(torch.ones(2))
    assert handoffs_of(run.layer_state).pending() == ()


class TestWrapping:
    """Code runs around a node by wrapping it: a node of the same slot that calls it."""

    def _wrapped(self, name: str, inner: Any) -> Any:
        def forward(node: Any, ctx: Any, *inputs: Tensor) -> Any:
            output = inner(ctx, *(x * 2 for x in inputs))
            return output + 1

        return _node(name, inner.slot, forward, reads=type(inner).reads, writes=type(inner).writes)

    def test_the_inner_nodes_handoffs_count(self) -> None:
        """What the inner node takes and puts is the wrapper's too; gradients go through both."""
        writer = _node("Writer", P, TestHandoffs._put, writes={"x": Tensor})(None)
        reader = _node("Reader", M, TestHandoffs._take, reads={"x": Tensor})(None)
        nodes = {P: self._wrapped("AroundWriter", writer), M: self._wrapped("AroundReader", reader)}
        plan = LayerPlan.build(nn.Identity(), nodes=nodes)
        for _ in range(2):
            run = SlotRun(plan)
            x = torch.tensor([1.0, 2.0], requires_grad=True)
            output = run.forward(x * 1.0)
            # writer: h = 2x, handoff 2h, output h + 1; reader: 2(h + 1) + 2h + 1
            assert output.tolist() == [11.0, 19.0]
            assert run.backward(torch.ones(2)).tolist() == [8.0, 8.0]
