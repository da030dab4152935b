"""Deferred weight gradients of a user's own layers: right numbers, added, delivered once, hooks fired in W."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Linear, Module, Parameter, Sequential
from torch.utils.checkpoint import checkpoint

from layernodes import Schedule, ScheduleError, Slot, schedules
from layernodes.errors import NodeStateError, StepError
from layernodes.stand_in import Site
from layernodes.wgrad import WgradStore
from tests.support.wgrads import (
    CommNode,
    FirstNode,
    Grid,
    ModuleNode,
    StoreNode,
    chunk_of,
    held_bytes,
    leaf,
    logged,
    plain,
    plan_of,
    run,
)

PRE, MLP, COMM = Slot.PRE_DISPATCH_COMPUTATION, Slot.MLP, Slot.MOE_DISPATCH
F0, B0 = "F0.L0.pre_dispatch_computation F0.L0.mlp", "B0.L0.mlp B0.L0.pre_dispatch_computation"
W_OUTER, W_INNER = "W0.L0.mlp", "W0.L0.pre_dispatch_computation"
ONE = "F0.L0.mlp B0.L0.mlp W0.L0.mlp"


def _double(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


class ParkingProduct(torch.autograd.Function):
    """``x @ w``, parked by the user's own function."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, anchor: Tensor, held: Tensor, store: WgradStore) -> Tensor:
        """Save what both products need."""
        ctx.save_for_backward(x, w)
        ctx.held, ctx.store = (held,), store
        return x @ w

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """The input's gradient now, the weight's later."""
        x, w = ctx.saved_tensors
        ctx.store.park(ctx.held[0], lambda: x.t() @ gradient)
        return gradient @ w.t(), None, None, None, None


def parked(module: Any, x: Tensor, store: WgradStore | None) -> Tensor:
    """``x @ w`` through the parking primitive."""
    if store is None:
        return x @ module.w
    output: Tensor = ParkingProduct.apply(x, module.w.detach(), store.anchor, (module.w), store)
    return output


class TestCases:
    """Small inputs of real faults, with numbers worked out by hand."""

    @pytest.mark.parametrize("drains", [f"{W_INNER} {W_OUTER}", f"{W_OUTER} {W_INNER}"])
    @pytest.mark.parametrize("before", [None, [[1.0, 1.0], [1.0, 1.0]]])
    @pytest.mark.parametrize("kind", ["linear", "matmul", "function"])
    def test_7_tied_weight(self, drains: str, before: Any, kind: str) -> None:
        """y = x wT, z = y wT, in two nodes; drained inner first and outer first; also with .grad set."""
        given = [[1, 2], [0, 1]] if kind == "linear" else [[1, 0], [2, 1]]
        module = Grid(_double(given))
        if before is not None:
            module.w.grad = _double(before)

        def node(base: type[ModuleNode]) -> Callable[[Module], ModuleNode]:
            if kind == "linear":
                return lambda it: base(it, lambda m, x: F.linear(x, m.w))
            if kind == "matmul":
                return lambda it: base(it, lambda m, x: x @ m.w)
            both = type("Both", (StoreNode, base), {})
            return lambda it: both(it, parked)  # type: ignore[no-any-return]

        chunk = chunk_of((module, {PRE: node(FirstNode), MLP: node(ModuleNode)}))
        run(f"{F0} {B0} {drains}", chunk, [_double([[1, -1]]).requires_grad_()])
        expected = _double([[0, -2], [2, -4]])
        expected = expected if kind == "linear" else expected.t()
        assert module.w.grad is not None
        assert torch.equal(module.w.grad, expected + (0 if before is None else _double(before)))

    @pytest.mark.parametrize("nodes", [1, 2])
    def test_8_the_same_weight_twice_on_one_path(self, nodes: int) -> None:
        """loss = sum(x w w), in one node and in two."""
        module = Grid([[0.5, -0.25], [0.75, 0.125]])
        x = _double([[1, -2]]).requires_grad_()
        if nodes == 1:
            found = run(ONE, plan_of(module, forward=lambda m, x: x @ m.w @ m.w), [x])
        else:
            once: Callable[[Any, Tensor], Tensor] = lambda m, x: x @ m.w  # noqa: E731
            chunk = chunk_of((module, {PRE: lambda it: FirstNode(it, once), MLP: lambda it: ModuleNode(it, once)}))
            found = run(f"{F0} {B0} {W_OUTER} {W_INNER}", chunk, [x])
        assert torch.equal(found.input_grads[0], _double([[-0.09375, 0.296875]]))
        assert torch.equal(module.w.grad, _double([[-0.75, -0.125], [-1.0, -2.25]]))

    def test_9_an_op_with_several_outputs(self) -> None:
        """(a, b) = chunk(x w), loss = 3a + 5b."""
        module = Grid([[1, 0], [0, 1]])

        class Chunked(ModuleNode):
            def forward(self, ctx: Any, *inputs: Tensor) -> Any:
                return (inputs[0] @ self.module.w).chunk(2, dim=-1)

        grads = [(_double([[3]]), _double([[5]]))]
        run(ONE, chunk_of((module, {MLP: Chunked})), [_double([[1, 2]]).requires_grad_()], loss_grads=grads)
        assert torch.equal(module.w.grad, _double([[3, 5], [6, 10]]))

    def test_10_bias_early_weight_late(self) -> None:
        """A hook takes the bias's gradient away as soon as it exists; then the weight is drained."""
        ours, theirs = Linear(3, 2).double(), Linear(3, 2).double()
        theirs.load_state_dict(ours.state_dict())
        batches = [torch.randn(4, 3, dtype=torch.float64) for _ in range(3)]
        plain(theirs, batches)
        buffer: list[Tensor] = []
        events: list[str] = []

        def take(bias: Parameter) -> None:
            assert bias.grad is not None
            buffer.append(bias.grad)
            bias.grad = None
            events.append("bias")

        ours.bias.register_post_accumulate_grad_hook(take)
        ours.weight.register_post_accumulate_grad_hook(lambda _: events.append("weight"))
        chunk = plan_of(ours)
        run(schedules.deferred(schedules.serial(chunk.shape, 3), chunk.shape, "end"), chunk, batches)
        assert torch.equal(ours.weight.grad, theirs.weight.grad)
        assert torch.equal(buffer[0] + buffer[1] + buffer[2], theirs.bias.grad)
        assert ours.bias.grad is None
        assert events == ["bias"] * 3 + ["weight"] * 3

    def test_11_partial_capability(self) -> None:
        """Only one of two nodes can defer: the other's gradients come with B, and the plan says so."""

        class Attention(FirstNode):
            def deferred_parameters(self) -> tuple[Parameter, ...]:
                return ()

        ours, theirs = (torch.nn.ModuleDict({"attention": Linear(3, 3), "mlp": Linear(3, 3)}).double() for _ in "ab")
        theirs.load_state_dict(ours.state_dict())
        batches = [torch.randn(4, 3, dtype=torch.float64) for _ in range(2)]
        plain(lambda x: theirs["mlp"](theirs["attention"](x)), batches)
        chunk = chunk_of(
            (ours, {PRE: lambda it: Attention(it["attention"]), MLP: lambda it: ModuleNode(it["mlp"])}),
        )
        first, second = chunk.layers[0].describe().nodes
        assert (first.with_backward, first.wgrad) == (("attention.weight", "attention.bias"), ())
        assert (second.with_backward, second.wgrad) == (("mlp.bias",), ("mlp.weight",))
        assert chunk.shape.layers[0].wgrad_slots == ("mlp",)
        arrived: list[str] = []
        step: list[str] = []
        for name, parameter in ours.named_parameters():
            parameter.register_post_accumulate_grad_hook(lambda _, name=name: arrived.append(f"{step[-1][0]} {name}"))
        run(
            schedules.deferred(schedules.serial(chunk.shape, 2), chunk.shape, "end"),
            chunk,
            batches,
            before_step=lambda s: step.append(str(s)),
        )
        assert sorted(set(arrived)) == ["B attention.bias", "B attention.weight", "B mlp.bias", "W mlp.weight"]
        assert all(torch.equal(a.grad, b.grad) for a, b in zip(ours.parameters(), theirs.parameters(), strict=True))


class TestStore:
    def test_a_users_function_parks_its_own(self) -> None:
        """Nothing of the weight is multiplied in B."""
        module = Grid(torch.randn(4, 5))
        chunk = chunk_of((module, {MLP: lambda it: StoreNode(it, parked)}))
        log = logged(ONE, chunk, [torch.randn(3, 4, requires_grad=True)])
        assert [len(log.products(phase)) for phase in ("F", "B", "W")] == [1, 1, 1]

    def test_a_weight_that_is_not_deferred_cannot_be_parked(self) -> None:
        """The error says what to do."""
        module = Grid(torch.randn(4, 4), other=torch.nn.Parameter(torch.randn(4)))

        def wrong(m: Any, x: Tensor, store: WgradStore | None) -> Tensor:
            assert store is not None
            store.park(m.other, lambda: None)
            return x @ m.w

        chunk = chunk_of((module, {MLP: lambda it: StoreNode(it, wrong)}))
        with pytest.raises(StepError, match=r"let deferred_parameters\(\) return it"):
            run(ONE, chunk, [torch.randn(3, 4)])

    def test_parking_after_the_drain_is_an_error(self) -> None:
        """What would never be computed is refused."""
        store = WgradStore()
        module = Grid(torch.randn(2, 2))
        with store.standing_in([Site(module, "w", module.w)]):
            held = module.w
        store.park(held, lambda: torch.ones(2, 2))
        assert store.num_parked == 1
        store.drain()
        assert store.num_parked == 0
        with pytest.raises(NodeStateError, match="before its W step"):
            store.park(held, lambda: torch.ones(2, 2))

    def test_an_unknown_deferred_parameter_is_refused_when_the_plan_is_built(self) -> None:
        """A weight that no module of the node holds could not be kept out of B."""

        class Stray(ModuleNode):
            def deferred_parameters(self) -> tuple[Parameter, ...]:
                return (torch.nn.Parameter(torch.zeros(2, 2)),)

        with pytest.raises(NodeStateError, match=r"names 1 that no module of modules\(\) holds"):
            chunk_of((Linear(2, 2), {MLP: Stray}))

    def test_modules_listed_twice_and_nested_are_restored(self) -> None:
        """Whatever modules() repeats, after a forward each module holds its own parameter again."""

        class Twice(ModuleNode):
            def __init__(self, module: Any) -> None:
                super().__init__(module)
                self.inner = module[0]

        block = Sequential(Linear(3, 3))
        weight = block[0].weight
        run(ONE, chunk_of((block, {MLP: Twice})), [torch.randn(2, 3)])
        assert block[0].weight is weight
        assert weight.grad is not None

    def test_a_parameter_replaced_after_the_build_stays(self) -> None:
        """Tied to another node or not, the module keeps what the user put there."""
        module = Linear(3, 3)
        chunk = chunk_of((module, {PRE: FirstNode, MLP: ModuleNode}))
        module.weight = new = torch.nn.Parameter(torch.randn(3, 3))
        run(f"{F0} {B0} {W_OUTER} {W_INNER}", chunk, [torch.randn(2, 3)])
        assert module.weight is new

    @pytest.mark.parametrize("kind", ["before", "after"])
    def test_forward_hooks_see_the_parameters_own(self, kind: str) -> None:
        """Megatron-Core's DDP looks the parameter up there, to wait for its all-gather."""
        module = Linear(3, 3)
        seen: list[bool] = []
        note: Callable[..., None] = lambda m, *_: seen.append(m.weight is weight)  # noqa: E731
        if kind == "before":
            module.register_forward_pre_hook(note)
        else:
            module.register_forward_hook(note)
        hooks = module._forward_pre_hooks if kind == "before" else module._forward_hooks
        weight = module.weight
        single, tied = plan_of(module), chunk_of((module, {PRE: FirstNode, MLP: ModuleNode}))
        fired: list[str] = []
        weight.register_post_accumulate_grad_hook(lambda _: fired.append(steps[-1]))
        steps: list[str] = []
        run(ONE, single, [torch.randn(2, 3)], before_step=lambda step: steps.append(str(step)))
        assert fired == ["W0.L0.mlp"]  # the product itself had the stand-in
        run(
            f"{F0} {B0} {W_OUTER} {W_INNER}",
            tied,
            [torch.randn(2, 3)],
            before_step=lambda step: steps.append(str(step)),
        )
        assert seen == [True] * 3
        twice = plan_of(module, forward=lambda m, x: m(m(x)))
        run(ONE, twice, [torch.randn(2, 3)], before_step=lambda step: steps.append(str(step)))
        assert fired == ["W0.L0.mlp", W_INNER, "W0.L0.mlp"]
        assert seen == [True] * 5
        assert len(hooks) == 1


class Counting:
    """A hook of the user's: computes the weight's gradient itself."""

    def __init__(self, module: Any, parked: list[Callable[[], Tensor]], log: list[str]) -> None:
        self._module, self._parked, self._log = module, parked, log

    def backward_dw(self) -> None:
        """Add what was parked, first in, first out."""
        self._log.append("W")
        gradient = self._parked.pop(0)()
        torch.autograd.backward([self._module.w], [gradient])

    def parameters(self) -> Iterator[Parameter]:
        """The weight."""
        yield self._module.w


class OwnHookNode(ModuleNode):
    """Defers ``x @ w`` by an object of its own."""

    def __init__(self, module: Module) -> None:
        super().__init__(module)
        self.queue: list[Callable[[], Tensor]] = []
        self.log: list[str] = []

    def forward(self, ctx: Any, *inputs: Tensor) -> Tensor:
        """x @ w, whose weight gradient the queue gets."""
        queue = self.queue

        class Product(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
                ctx.save_for_backward(x, w)
                return x @ w

            @staticmethod
            def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
                x, w = ctx.saved_tensors
                queue.append(lambda: x.t() @ gradient)
                return gradient @ w.t(), None

        output: Tensor = Product.apply(inputs[0], self.module.w.detach())
        return output

    def wgrad_hook(self) -> Counting:
        """Fresh for each microbatch."""
        return Counting(self.module, self.queue, self.log)


def test_a_hook_that_the_user_writes() -> None:
    """It is drained once a microbatch, its parameters count as deferred, and nobody else defers them."""
    ours, theirs = Grid(torch.randn(3, 4).double()), Grid(torch.zeros(3, 4).double())
    theirs.load_state_dict(ours.state_dict())
    batches = [torch.randn(2, 3, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    plain(lambda x: x @ theirs.w, batches)
    chunk = chunk_of((ours, {MLP: OwnHookNode}))
    (node,) = chunk.layers[0].describe().nodes
    assert node.wgrad == ("w",)
    run(schedules.deferred(schedules.serial(chunk.shape, 3), chunk.shape, "end"), chunk, batches)
    assert torch.equal(ours.w.grad, theirs.w.grad)
    assert chunk.layers[0].nodes[MLP].log == ["W"] * 3  # type: ignore[attr-defined]


class Mixed(Module):
    """Uses one weight in two products and beside them."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.inner = Linear(size, size)
        self.bare = torch.nn.Parameter(torch.randn(size, size))

    def forward(self, x: Tensor) -> Tensor:
        """product, another operation on the same weight, product; and the other matrix the same way."""
        x = self.inner(x) + x @ self.bare
        x = x * self.inner.weight.sigmoid().mean(0) + self.bare.tanh().mean(0)
        return self.inner(x) @ self.bare


@pytest.mark.parametrize("seed", range(8))
def test_a_weight_that_other_operations_use_between_products(seed: int) -> None:
    """The sum is in plain autograd's order, so the bits are equal; hooks fire in W only, once a microbatch."""
    torch.manual_seed(seed)
    ours, theirs = Mixed(7), Mixed(7)
    theirs.load_state_dict(ours.state_dict())
    batches = [torch.randn(5, 7, requires_grad=True) for _ in range(3)]
    expected = plain(theirs, batches)
    chunk = plan_of(ours)
    steps: list[str] = []
    fired: list[str] = []
    for parameter in (ours.inner.weight, ours.bare):
        parameter.register_post_accumulate_grad_hook(lambda _: fired.append(steps[-1]))
    found = run(
        schedules.deferred(schedules.serial(chunk.shape, 3), chunk.shape, "end"),
        chunk,
        batches,
        before_step=lambda step: steps.append(str(step)),
    )
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(ours.parameters(), theirs.parameters(), strict=True))
    assert all(torch.equal(a, b) for a, b in zip(expected, found.input_grads, strict=True))
    assert sorted(fired) == [f"W{m}.L0.mlp" for m in range(3) for _ in "ab"]


@pytest.mark.parametrize(
    "wrapped",
    [
        lambda module, x: checkpoint(module, x, use_reentrant=False),
        lambda module, x: checkpoint(module, x, use_reentrant=True),
        lambda module, x: torch.vmap(module)(x),
    ],
    ids=["checkpoint", "reentrant checkpoint", "vmap"],
)
def test_what_cannot_be_deferred_equals_plain_autograd(wrapped: Any) -> None:
    """An activation checkpoint records its forward again in backward, and a ``torch.func`` transform takes no function
    like ours: nothing of it is deferred, nothing is lost."""
    torch.manual_seed(0)
    ours, theirs = (Sequential(Linear(4, 5), Linear(5, 4)) for _ in "ab")
    theirs.load_state_dict(ours.state_dict())

    def forward(module: Any, x: Tensor) -> Tensor:
        output: Tensor = module[1](wrapped(module[0], x))
        return output

    batches = [torch.randn(3, 4, requires_grad=True) for _ in range(2)]
    plain(lambda x: forward(theirs, x), batches)
    chunk = plan_of(ours, forward=forward)
    run(schedules.deferred(schedules.serial(chunk.shape, 2), chunk.shape, "end"), chunk, batches)
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(ours.parameters(), theirs.parameters(), strict=True))


class TestFrozen:
    def test_before_the_build(self) -> None:
        """A frozen weight has no W; where nothing else is deferred, neither has the slot."""
        module = Linear(3, 3)
        module.weight.requires_grad_(False)
        chunk = plan_of(module)
        assert chunk.shape.layers[0].wgrad_slots == ()
        run("F0.L0.mlp B0.L0.mlp", chunk, [torch.randn(2, 3)])
        assert module.weight.grad is None
        assert module.bias.grad is not None

    def test_after_the_build_and_thawed_again(self) -> None:
        """The W step stays and does nothing; thawed, it delivers again."""
        module = Linear(3, 3)
        chunk = plan_of(module)
        module.weight.requires_grad_(False)
        run(ONE, chunk, [torch.randn(2, 3)])
        assert module.weight.grad is None
        module.weight.requires_grad_(True)
        run(ONE, chunk, [torch.randn(2, 3)])
        assert module.weight.grad is not None

    def test_a_tied_weight_frozen_after_the_build(self) -> None:
        """No gradient, no error."""
        module = Linear(3, 3)
        chunk = chunk_of((module, {PRE: FirstNode, MLP: ModuleNode}))
        module.weight.requires_grad_(False)
        run(f"{F0} {B0} {W_OUTER} {W_INNER}", chunk, [torch.randn(2, 3)])
        assert module.weight.grad is None
        assert module.bias.grad is not None

    def test_frozen_before_the_build_and_thawed(self) -> None:
        """It comes with B."""
        module = Linear(3, 3)
        module.weight.requires_grad_(False)
        chunk = plan_of(module)
        module.weight.requires_grad_(True)
        run("F0.L0.mlp B0.L0.mlp", chunk, [torch.randn(2, 3)])
        assert module.weight.grad is not None


@pytest.mark.parametrize("kind", ["linear", "empty rows"])
def test_zero_rows_give_zeros_not_none(kind: str) -> None:
    """An expert without tokens."""
    module = Linear(3, 2)
    run(ONE, plan_of(module), [torch.randn(0, 3, requires_grad=True)])
    assert module.weight.grad is not None
    assert torch.equal(module.weight.grad, torch.zeros(2, 3))


@pytest.mark.parametrize("wgrad", ["auto", "off"])
def test_what_waits_between_b_and_w_is_the_input_and_the_outputs_gradient(wgrad: str) -> None:
    """Of each linear: storages that Python holds after B. Without deferral none of them does."""
    torch.manual_seed(0)
    module = Sequential(Linear(16, 32), torch.nn.ReLU(), Linear(32, 8))
    chunk = plan_of(module, wgrad=wgrad)
    parameters = sum(p.nbytes for p in module.parameters())
    biases = sum(module[i].bias.nbytes for i in (0, 2))
    x = torch.randn(64, 16, requires_grad=True)
    loss_grad = torch.randn(64, 8)
    given = x.nbytes + loss_grad.nbytes
    start = held_bytes() - parameters - given
    at = next(i for i, place in enumerate(chunk.places) if place.node is not None)
    chunk_run = chunk.open(x)
    chunk_run.forward(at, None)
    chunk_run.end_forward()
    chunk_run.begin_backward(loss_grad)
    chunk_run.output = None
    chunk_run.backward(at)
    chunk_run.end_backward()
    chunk_run.input_grad = None
    waiting = held_bytes() - start
    hidden = 64 * 32 * 4
    if wgrad == "off":
        assert waiting == 2 * parameters + given
    else:
        assert waiting == parameters + biases + given + hidden + hidden  # the hidden activation and its gradient
        chunk_run.weight_gradients(at)
        assert held_bytes() - start == 2 * parameters + given
    chunk_run.close()


class TestHooks:
    def test_every_kind_of_hook_fires_once_a_microbatch_in_w(self) -> None:
        """Tensor hooks, post-accumulate hooks and hooks of the accumulator, each with the whole gradient there."""
        module = Linear(3, 3)
        steps: list[str] = []
        fired: list[tuple[str, str]] = []
        weight = module.weight
        accumulator = weight.expand_as(weight).grad_fn.next_functions[0][0]  # type: ignore[union-attr]
        weight.register_hook(lambda g: fired.append(("tensor", steps[-1])))
        weight.register_post_accumulate_grad_hook(lambda p: fired.append(("post", steps[-1])))
        accumulator.register_hook(lambda *_: fired.append(("accumulator", steps[-1])))
        chunk = plan_of(module)
        order = schedules.deferred(schedules.forward_forward(chunk.shape, 2), chunk.shape, "end")
        run(order, chunk, [torch.randn(2, 3)] * 2, before_step=lambda step: steps.append(str(step)))
        names = ("tensor", "post", "accumulator")
        assert sorted(fired) == sorted((name, f"W{m}.L0.mlp") for m in range(2) for name in names)

    def test_a_tied_weight_fires_once_a_microbatch_after_its_last_use(self) -> None:
        """Two nodes that defer it, and one that does not."""

        class Plain(FirstNode):
            def deferred_parameters(self) -> tuple[Parameter, ...]:
                return ()

        for first in (FirstNode, Plain):
            module = Linear(3, 3)
            steps: list[str] = []
            fired: list[str] = []
            module.weight.register_post_accumulate_grad_hook(lambda _, f=fired, s=steps: f.append(s[-1]))
            chunk = chunk_of((module, {PRE: first, MLP: ModuleNode}))
            order = f"{F0} {B0} {W_OUTER}" if first is Plain else f"{F0} {B0} {W_OUTER} {W_INNER}"
            run(order, chunk, [torch.randn(2, 3)], before_step=lambda step, s=steps: s.append(str(step)))
            assert fired == [order.rsplit(maxsplit=1)[-1]]

    @pytest.mark.parametrize("place", ["after_b", "next_comm", "end", "first_layer_last"])
    def test_the_last_firing_is_the_one_after_which_the_gradient_is_complete(self, place: str) -> None:
        """A sharded optimizer that counts: at firing number M the parameter has all of its gradient."""
        torch.manual_seed(1)
        modules = [Sequential(Linear(4, 4), torch.nn.Tanh(), Linear(4, 4)) for _ in range(2)]
        final: dict[Parameter, Tensor] = {}
        counts: dict[Parameter, int] = {}

        def ready(parameter: Parameter) -> None:
            assert parameter.grad is not None
            counts[parameter] = counts.get(parameter, 0) + 1
            if counts[parameter] == 4:
                final[parameter] = parameter.grad.clone()

        for module in modules:
            for parameter in module.parameters():
                parameter.register_post_accumulate_grad_hook(ready)
        chunk = plan_of(*modules)
        order = schedules.deferred(schedules.combined_1f1b(chunk.shape, 4), chunk.shape, place)
        run(order, chunk, [torch.randn(3, 4) for _ in range(4)])
        for module in modules:
            for parameter in module.parameters():
                assert counts[parameter] == 4
                assert torch.equal(final[parameter], parameter.grad)  # type: ignore[arg-type]


class TestPending:
    def test_a_run_that_ends_with_pending_weight_gradients_lists_them(self) -> None:
        """Whatever let them be: here a schedule that was run without its W."""
        chunk = plan_of(Linear(3, 3), Linear(3, 3))
        open_run = chunk.open(torch.randn(2, 3))
        places = [i for i, place in enumerate(chunk.places) if place.node is not None]
        for index in places:
            open_run.forward(index, None)
        open_run.end_forward()
        assert open_run.pending_wgrads() == ()
        open_run.begin_backward(None)
        for index in reversed(places):
            open_run.backward(index)
        assert open_run.pending_wgrads() == ("L0.mlp (weight)", "L1.mlp (weight)")
        with pytest.raises(NodeStateError, match=r"L0\.mlp \(weight\); L1\.mlp \(weight\); run the W of each B"):
            open_run.close()
        assert open_run.pending_wgrads() == ()
        open_run.close()

    def test_the_runner_checks_at_the_end(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A W that does not do its work is found."""
        from layernodes.plan.chunk_run import ChunkRun  # noqa: PLC0415

        chunk = plan_of(Linear(3, 3))
        monkeypatch.setattr(ChunkRun, "weight_gradients", lambda self, index, lane: None)
        with pytest.raises(NodeStateError, match=r"microbatch 0: L0\.mlp \(weight\)"):
            run(ONE, chunk, [torch.randn(2, 3)])

    def test_a_failure_is_not_masked_by_what_it_left_pending(self) -> None:
        """The step's error surfaces, and the next run works."""
        module = Linear(3, 3)
        chunk = plan_of(module)
        fail = [True]

        def hook(_: Parameter) -> None:
            if fail:
                raise RuntimeError("boom")

        module.weight.register_post_accumulate_grad_hook(hook)
        with pytest.raises(StepError, match=r"W0\.L0\.mlp raised RuntimeError: boom"):
            run(ONE, chunk, [torch.randn(2, 3)])
        fail.clear()
        run(ONE, chunk, [torch.randn(2, 3)])

    def test_a_schedule_without_w_is_refused_under_deferral(self) -> None:
        """It names the missing step."""
        with pytest.raises(ScheduleError, match=r"W0\.L0\.mlp"):
            run("F0.L0.mlp B0.L0.mlp", plan_of(Linear(3, 3)), [torch.randn(2, 3)])

    def test_w_is_refused_without_deferral_with_a_hint(self) -> None:
        """It says how to switch deferral on."""
        with pytest.raises(ScheduleError, match="wgrad="):
            run(ONE, plan_of(Linear(3, 3), wgrad="off"), [torch.randn(2, 3)])


def test_w_runs_on_the_lane_of_its_node() -> None:
    """Bound when W runs: a communication node's weight gradient is computed by the communication thread."""
    import threading  # noqa: PLC0415

    module = torch.nn.ModuleDict({"a": Linear(3, 3), "b": Linear(3, 3)})
    chunk = chunk_of((module, {COMM: lambda it: CommNode(it["a"]), MLP: lambda it: ModuleNode(it["b"])}))
    assert chunk.shape.layers[0].wgrad_slots == ("moe_dispatch", "mlp")
    threads: dict[str, set[str]] = {}
    for name, parameter in module.named_parameters():
        parameter.register_post_accumulate_grad_hook(
            lambda _, name=name: threads.setdefault(name, set()).add(threading.current_thread().name)
        )
    order = schedules.deferred(schedules.combined_1f1b(chunk.shape, 3), chunk.shape, "end")
    run(order, chunk, [torch.randn(2, 3) for _ in range(3)], streams="threads")
    caller = threading.current_thread().name
    assert threads["a.weight"] == {"layernodes-comm"}
    assert threads["b.weight"] == {caller}


def test_backward_that_never_reaches_a_weight_leaves_none() -> None:
    """As in plain autograd: a parameter that the loss does not depend on has no gradient."""
    module = torch.nn.ModuleList([Linear(3, 3), Linear(3, 3)])
    run(ONE, plan_of(module, forward=lambda m, x: m[0](x)), [torch.randn(2, 3)])
    assert module[1].weight.grad is None
    assert module[0].weight.grad is not None


def test_a_nodes_weights_are_delivered_one_by_one() -> None:
    """While one weight's gradient is delivered, the next is not computed yet: no second copy of all of them."""
    module = Sequential(Linear(3, 3), Linear(3, 3), Linear(3, 3))
    chunk = plan_of(module)
    events: list[str] = []
    for name, parameter in module.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: events.append(name))
    log_products: list[int] = []

    def note(step: Any) -> None:
        if str(step).startswith("W"):
            from torch.utils._python_dispatch import TorchDispatchMode  # noqa: PLC0415

            class Note(TorchDispatchMode):
                def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                    if func.overloadpacket.__name__ == "mm":
                        events.append("mm")
                    return func(*args, **(kwargs or {}))

            mode = Note()
            mode.__enter__()
            log_products.append(1)
            modes.append(mode)

    modes: list[Any] = []
    run(
        ONE,
        chunk,
        [torch.randn(2, 3)],
        before_step=note,
        after_step=lambda _: modes and modes.pop().__exit__(None, None, None),
    )
    assert events[-6:] == ["mm", "2.weight", "mm", "1.weight", "mm", "0.weight"]


def test_the_gradient_has_the_parameters_dtype() -> None:
    """What a function of the user's parks in another dtype is cast, as autograd casts it."""
    module = Grid(torch.nn.Parameter(torch.randn(4, 4, dtype=torch.bfloat16)))

    def wide(m: Any, x: Tensor, store: WgradStore | None) -> Tensor:
        assert store is not None
        held = m.w

        class Wide(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, x: Tensor, anchor: Tensor) -> Tensor:
                return x * 2

            @staticmethod
            def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
                store.park(held, lambda: torch.ones(4, 4, dtype=torch.float32))
                return gradient * 2, None

        output: Tensor = Wide.apply(x, store.anchor)
        return output

    run(ONE, chunk_of((module, {MLP: lambda it: StoreNode(it, wide)})), [torch.randn(3, 4)])
    assert module.w.grad is not None
    assert module.w.grad.dtype is torch.bfloat16


def test_leaf_makes_float64() -> None:
    """The suite's numbers are exact."""
    assert leaf([[1, 2]]).dtype is torch.float64
    assert Schedule.parse(ONE).steps
