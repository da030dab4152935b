"""Megatron-Core's training loop under a schedule gives the plain run's bits: losses and parameters."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.timers import Timers
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch.nn import Module

from layernodes import (
    ArgumentError,
    ChunkPlan,
    CostModel,
    LayerHooks,
    NodeStateError,
    OptionError,
    PairSchedule,
    Phase,
    ScheduleError,
    StepError,
    UnsupportedLayerError,
    optimize_pair,
)
from layernodes.megatron import install, schedule
from layernodes.plan import pairs, schedules
from layernodes.training import ChunkSchedulePlan
from tests.support.fixtures import MEGATRON_WORLD, megatron_world
from tests.support.full import FULL
from tests.support.ranks import values_on_ranks
from tests.support.timers import CountingTimers
from tests.support.training import (
    BATCH,
    PLAIN,
    SEQ,
    VOCAB,
    WAYS,
    Case,
    Trainer,
    Way,
    compare,
    compare_all,
    compare_resumed,
    train,
    zipper,
)

__all__ = ["megatron_world"]

pytestmark = MEGATRON_WORLD

_STEPS, _LONG = 2, 50 if FULL else 2
_TIMEOUT = 3000.0 if FULL else 500.0
_TIMES = {"seconds": _TIMEOUT, "group_seconds": _TIMEOUT}

_OVERLAP = {"overlap_grad_reduce": True}
_DISTRIBUTED = {**_OVERLAP, "use_distributed_optimizer": True}
_GATHER = {**_DISTRIBUTED, "overlap_param_gather": True}

_ONE = (
    Case(name="fp32"),
    Case(name="bf16, MTP, tied", bf16=True, mtp=1, tied=True),
    Case(name="bf16, MTP, masked", bf16=True, mtp=1, masked=True),
    Case(name="no DDP, MTP, dense last", layers="MD", ddp=None, mtp=1),
    Case(name="per token, masked, scaled", per_token=True, masked=True, loss_scale=8.0, mtp=1),
    Case(name="one microbatch", num_microbatches=1),
    Case(name="two MTP layers", mtp=2),
    Case(name="allgather", config={"moe_token_dispatcher_type": "allgather"}),
    Case(name="dense only", layers="DD"),
)
_TWO = (
    Case(name="EP=2", ep=2),
    Case(name="EP=2, bf16, MTP, tied, masked", ep=2, bf16=True, mtp=1, tied=True, masked=True),
    Case(name="EP=2, distributed optimizer, gather overlapped", ep=2, bf16=True, ddp=_GATHER),
    Case(name="DP=2, distributed optimizer", ddp=_DISTRIBUTED),
    Case(name="DP=2, distributed optimizer, bf16, MTP, tied", ddp=_DISTRIBUTED, bf16=True, mtp=1, tied=True),
    Case(name="DP=2, gather overlapped, MTP", ddp=_GATHER, mtp=1),
)
_STAGES: dict[str, Any] = {"pp": 2, "vpp": 2, "ep": 2, "layers": "MMMM"}
_FOUR = (
    Case(name="stages", **_STAGES),
    Case(name="stages, bf16, MTP, tied", **_STAGES, bf16=True, mtp=1, tied=True),
    Case(
        name="stages, warmup and flush overlapped, outputs deallocated",
        **{**_STAGES, "layers": "DMMD"},
        config={"overlap_p2p_comm_warmup_flush": True, "deallocate_pipeline_outputs": True},
    ),
    Case(
        name="stages, everything overlapped and aligned, per token",
        **_STAGES,
        ddp=_GATHER,
        bind_sync=True,
        per_token=True,
        masked=True,
        loss_scale=4.0,
        bf16=True,
        mtp=1,
        tied=True,
        embeds=True,
    ),
)


@pytest.mark.parametrize("case", _ONE, ids=lambda case: case.name)
def test_one_process(case: Case) -> None:
    """On one process."""
    assert compare(case, WAYS, _LONG if case in _ONE[:2] else _STEPS) == []


@pytest.mark.parametrize("world_size, cases", [(2, _TWO), (4, _FOUR)], ids=["2 processes", "4 processes"])
@pytest.mark.timeout(_TIMEOUT + 60)
def test_processes(world_size: int, cases: tuple[Case, ...]) -> None:
    """With expert and data parallelism on two processes; with pipeline and virtual stages on four."""
    ways = WAYS
    if not FULL:  # starting and switching processes takes most of the time
        ways = WAYS[::2] if world_size == 2 else WAYS[::6]
        cases = cases if world_size == 2 else cases[:1] + cases[2:]
    lengths = [(case, _LONG if case in cases[:2] else _STEPS) for case in cases]
    found = values_on_ranks(f"{compare_all.__module__}:compare_all", lengths, ways, world_size=world_size, **_TIMES)
    assert found == [[]] * world_size


def test_buckets_of_gradients_that_steps_of_both_streams_complete() -> None:
    """DDP starts the reduction of a bucket in whichever step completes it: of the final norm, in ``moe_combine``."""
    case = Case(name="small buckets", layers="M", ddp={**_OVERLAP, "bucket_size": 520}, num_microbatches=2)
    assert values_on_ranks(f"{compare_all.__module__}:compare_in_contexts", case, WAYS[:3], **_TIMES) == [[], []]


_CHANGES = ((PLAIN, WAYS[0]), (WAYS[0], WAYS[3]), (WAYS[2], PLAIN), (WAYS[6], WAYS[4]))


def test_checkpoint_of_one_process() -> None:
    """A checkpoint written under one schedule resumes under another, and under the plain loop, with the same bits."""
    assert compare_resumed(Case(name="bf16", bf16=True, mtp=1, tied=True), _CHANGES, 2) == []


def test_checkpoint_of_two_processes() -> None:
    """The same with experts on two ranks and the distributed optimizer."""
    case = Case(name="EP=2", ep=2, bf16=True, ddp=_DISTRIBUTED)
    found = values_on_ranks(f"{compare_resumed.__module__}:compare_resumed", case, _CHANGES, 2, **_TIMES)
    assert found == [[], []]


def test_evaluation_inside_the_context() -> None:
    """``forward_only`` evaluates the plain model, between training steps too."""
    case = Case(name="evaluation")
    one, two = Trainer(case), None
    one.run(PLAIN, 1)
    one.run(PLAIN, 1, forward_only=True)
    one.run(PLAIN, 1)
    expected = one.trained()
    two = Trainer(case)
    two.run(WAYS[0], 1)
    two.run(WAYS[0], 1, forward_only=True)
    two.run(WAYS[0], 1)
    assert expected.difference(two.trained()) is None


@pytest.mark.parametrize("way", [PLAIN, WAYS[0], WAYS[4]], ids=str)
def test_timers(way: Way) -> None:
    """Megatron-Core's own timers run, the one of the backward too; counts are compared wherever training is."""
    trainer = Trainer(Case(name="timers"))
    trainer.config.timers = Timers(log_level=2, log_option="minmax")
    trainer.run(way, 1)
    for name in ("forward-backward", "forward-compute", "backward-compute", "all-grads-sync"):
        assert trainer.config.timers(name).elapsed(barrier=False) > 0


def test_the_timer_of_a_backward_that_fails_stops() -> None:
    """It may be started again."""
    trainer = Trainer(Case(name="timers"))
    timers = trainer.config.timers
    weight = trainer.chunks[0].module.decoder.layers[0].mlp.router.weight

    def fail(_: Any) -> None:
        raise _Stop

    handle = weight.register_post_accumulate_grad_hook(fail)
    with pytest.raises(StepError, match="_Stop"):
        trainer.run(WAYS[1], 1)
    handle.remove()
    assert timers.running == {"forward-backward", "forward-compute"}  # Megatron-Core's own
    assert timers.counts["backward-compute"] == 1


# What Megatron-Core's loop calls.


def _plan(model: Any) -> ChunkSchedulePlan:
    tokens = torch.randint(VOCAB, (BATCH, SEQ))
    positions = torch.arange(SEQ).expand(BATCH, SEQ).contiguous()
    return model.build_schedule_plan(tokens, positions, None, labels=tokens)


def _model(**options: Any) -> Any:
    return Trainer(Case(name="model", ddp=None, **options)).chunks[0]


_RULES: tuple[Any, ...] = (*pairs.BUILT_IN, zipper)


@pytest.mark.parametrize("order", _RULES, ids=lambda order: getattr(order, "__name__", order))
@pytest.mark.parametrize("streams", ["inline", "threads"])
def test_callbacks(order: Any, streams: str) -> None:
    """They come in Megatron-Core's order: ``pre_forward`` before the forward and ``pre_backward`` before the backward,
    ``post_forward`` after the last layer, ``post_backward`` after the first; only then the first layer's weights."""
    model = _model()
    first = model.decoder.layers[0].self_attention.linear_proj.weight
    last = model.decoder.layers[-1].self_attention.linear_proj.weight
    log: list[str] = []
    grads: dict[str, Any] = {}

    def note(name: str, *values: Any) -> None:
        log.append(name)
        grads[name] = (first.grad is not None, last.grad is not None, values)

    with schedule(model, order, wgrad="auto", streams=streams):
        before = _plan(model)
        output = ChunkSchedulePlan.run(None, None)
        assert output is None
        output = ChunkSchedulePlan.run(before, None)
        after = _plan(model)
        calls = ("pre_forward", "pre_backward", "post_forward", "post_backward")
        ChunkSchedulePlan.run(
            after, before, b_grad=torch.ones_like(output), **{name: partial(note, name) for name in calls}
        )
        # Where the backward follows the forward, as in the plain loop, the wait for its gradient does too.
        follows = order in ("serial", "forward_forward")
        assert log == ([calls[0], calls[2], calls[1], calls[3]] if follows else list(calls))
        assert grads["pre_backward"][:2] == (False, False)
        assert not grads["post_backward"][0]
        assert order is zipper or grads["post_backward"][1]
        assert first.grad is not None and last.grad is not None
        assert grads["pre_forward"][2] == grads["pre_backward"][2] == (None,)
        (sent, stage), (sent_back, _) = grads["post_forward"][2], grads["post_backward"][2]
        assert stage is None and sent.shape == sent_back.shape == (SEQ, BATCH, 16)
        assert sent.requires_grad
        assert len(log) == len(calls)


def test_first_layers_weights_come_after_the_send() -> None:
    """Of a built-in order only the first layer's first slot waits; all the others are there when it is sent."""
    model = _model(layers="MMM")
    seen: list[list[bool]] = []

    def weights() -> list[bool]:
        layers = model.decoder.layers
        return [layer.self_attention.linear_proj.weight.grad is not None for layer in layers]

    with schedule(model, "combined_1f1b", wgrad="auto", streams="inline"):
        plan = _plan(model)
        output = ChunkSchedulePlan.run(plan, None)
        ChunkSchedulePlan.run(
            None, plan, b_grad=torch.ones_like(output), post_backward=lambda *_: seen.append(weights())
        )
    assert seen == [[False, True, True]]
    assert weights() == [True, True, True]


# Entering, leaving, refusing.


def _flags(model: Any) -> set[tuple[bool, bool]]:
    configs = {id(m.config): m.config for m in model.modules() if hasattr(m, "config")}
    return {(c.overlap_moe_expert_parallel_comm, c.delay_wgrad_compute) for c in configs.values()}


class _Stop(Exception):
    pass


@pytest.mark.parametrize("fail", [False, True])
def test_everything_is_restored(fail: bool) -> None:
    """Megatron-Core's names and every configuration are as before, after an exception too."""
    own = dict(vars(GPTModel))
    model = _model(mtp=1)
    attributes = {name: dict(vars(module)) for name, module in model.named_modules()}
    context = schedule(model, "combined_1f1b", wgrad="auto")
    try:
        with context:
            assert _flags(model) == {(True, True)}
            output = ChunkSchedulePlan.run(_plan(model), None)
            assert output is not None
            if fail:
                raise _Stop
    except _Stop:
        pass
    assert dict(vars(GPTModel)) == own
    assert _flags(model) == {(False, False)}
    for name, module in model.named_modules():
        assert vars(module).keys() == attributes[name].keys()
    assert type(_plan(model)).__module__.startswith("megatron")
    with context:  # and it may be entered again
        assert isinstance(_plan(model), ChunkSchedulePlan)


def test_restored_when_a_step_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error within a step surfaces as StepError; afterwards the plain run's bits come out of the same trainer."""
    case = Case(name="failure")
    trainer = Trainer(case)
    state = trainer.checkpoint()
    with monkeypatch.context() as patch:
        calls: list[int] = []
        own = trainer.chunks[0].module.decoder.layers[1].mlp.router.gating

        def gating(*arguments: Any) -> Any:
            calls.append(1)
            if len(calls) == 3:
                raise _Stop
            return own(*arguments)

        patch.setattr(trainer.chunks[0].module.decoder.layers[1].mlp.router, "gating", gating)
        with pytest.raises(StepError, match=r"F0\.L1\.pre_dispatch_computation raised _Stop"):
            trainer.run(WAYS[0], 1)
    trainer.resume(state)
    trainer.config.timers = CountingTimers()  # Megatron-Core leaves the one of the forward running
    trainer.run(WAYS[0], 2)
    assert train(case, PLAIN, 2).difference(trainer.trained()) is None


def test_nested_contexts_are_refused() -> None:
    """One schedule() at a time; the outer one goes on."""
    model, other = _model(), _model()
    with schedule(model) as outer:
        with pytest.raises(NodeStateError, match=r"inside another schedule\(\)"), schedule(other):
            pass
        with pytest.raises(NodeStateError, match="entered already"), outer:
            pass
        assert _flags(other) == {(False, False)}
        assert isinstance(_plan(model), ChunkSchedulePlan)


def test_inside_install() -> None:
    """``install()`` and ``schedule()`` do not stand in each other's way."""
    case = Case(name="both")
    with install():
        under = train(case, WAYS[0], 1)
    assert train(case, PLAIN, 1).difference(under) is None


def test_a_model_that_was_not_given() -> None:
    """The plan of another model is refused, by name of what to do."""
    model, other = _model(), _model()
    with schedule(model), pytest.raises(NodeStateError, match="give it all model chunks of this rank"):
        _plan(other)


class _OwnForward(GPTModel):
    def forward(self, *arguments: Any, **options: Any) -> Any:
        return super().forward(*arguments, **options)


def test_all_reasons_at_once() -> None:
    """Whatever is wrong with a configuration is in one error, with field, value and reason, before anything runs."""
    model = _model()
    model.__class__ = _OwnForward
    config = model.config
    config.pipeline_model_parallel_size = 2
    config.num_microbatches_with_partial_activation_checkpoints = 1
    config.hybrid_context_parallel = True
    config.overlap_dispatch_backward_with_experts_wgrad = True
    layer = model.decoder.layers[1]
    layer.cross_attention = torch.nn.Linear(1, 1)
    with pytest.raises(UnsupportedLayerError) as caught, schedule(model):
        pass
    found = {violation.field: violation.value for violation in caught.value.violations}
    assert found == {
        "virtual_pipeline_model_parallel_size": None,
        "hybrid_context_parallel": True,
        "num_microbatches_with_partial_activation_checkpoints": 1,
        "overlap_dispatch_backward_with_experts_wgrad": True,
        "_OwnForward.forward": _OwnForward.forward,
        "cross_attention": torch.nn.Linear,
    }
    for violation in caught.value.violations:
        assert violation.field in str(caught.value) and violation.reason in str(caught.value)
    assert (caught.value.field, caught.value.value) == ("virtual_pipeline_model_parallel_size", None)
    assert _flags(model) == {(False, False)}


def test_two_stages_need_overlapped_messages() -> None:
    """Two interleaved stages with batched messages, where the plain loop is wrong already; missing chunks."""
    model = _model()
    config = model.config
    config.pipeline_model_parallel_size = config.virtual_pipeline_model_parallel_size = 2
    with pytest.raises(UnsupportedLayerError) as caught, schedule(model):
        pass
    assert [violation.field for violation in caught.value.violations] == ["models", "overlap_p2p_comm"]
    config.overlap_p2p_comm = True
    with pytest.raises(UnsupportedLayerError) as caught, schedule([model, model]):
        pass
    assert [violation.field for violation in caught.value.violations] == ["batch_p2p_comm", "models"]
    assert "given twice" in str(caught.value)


def test_something_else_than_a_model() -> None:
    """A module that is no GPTModel."""
    with pytest.raises(UnsupportedLayerError, match="is no GPTModel"), schedule(torch.nn.Linear(1, 1)):
        pass


@pytest.mark.parametrize(
    "options",
    [
        {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
        {"recompute_granularity": "selective", "recompute_modules": ["moe"]},
    ],
    ids=["full", "moe"],
)
def test_recompute_is_said_not_to_be_done(options: dict[str, Any]) -> None:
    """The numbers are the same; a warning says that no memory is saved."""
    case = Case(name="recompute", config=options)
    plain = train(case, PLAIN, 1)
    trainer = Trainer(case)
    with pytest.warns(UserWarning, match="is not done"):
        trainer.run(WAYS[0], 1)
    assert plain.difference(trainer.trained()) is None


@pytest.mark.parametrize(
    "options",
    [
        {"moe_shared_expert_intermediate_size": 16, "moe_shared_expert_overlap": True},
        {"moe_shared_expert_intermediate_size": 16},
        {"recompute_granularity": "selective", "recompute_modules": ["core_attn", "layernorm"]},
        {"mlp_chunks_for_training": 2},
    ],
    ids=["overlapped shared experts", "shared experts", "selective recompute", "mlp chunks"],
)
def test_lifted_constraints(options: dict[str, Any]) -> None:
    """What Megatron-Core's own validator refuses with the overlap, or its plan does wrongly."""
    assert compare(Case(name="lifted", config=options, mtp=1), (WAYS[0], WAYS[6]), 1) == []


# Schedules that do not fit.


def test_a_rule_is_checked_on_entering() -> None:
    """A schedule that is not valid for chunks that may meet is refused before anything runs."""

    def backwards(forward: Any, backward: Any) -> PairSchedule:
        return PairSchedule(reversed(list(pairs.serial(forward, backward))))

    model = _model()
    with pytest.raises(ScheduleError) as caught, schedule(model, backwards):
        pass
    assert caught.value.violations
    assert _flags(model) == {(False, False)}
    assert isinstance(_plan(model), object) and type(_plan(model)).__module__.startswith("megatron")


def test_a_rule_without_its_weight_gradients() -> None:
    """A user's function places the ``W`` steps itself; one without is told so."""

    def forgetful(forward: Any, backward: Any) -> PairSchedule:
        return PairSchedule(step for step in pairs.serial(forward, backward) if step.phase is not Phase.W)

    with pytest.raises(ScheduleError, match=r"W1\.L0"), schedule(_model(), forgetful, wgrad="auto"):
        pass


def test_unknown_names() -> None:
    """The error lists the names that there are."""
    with pytest.raises(ScheduleError, match="serial, combined_1f1b"):
        schedule(_model(), "serail")
    with pytest.raises(ScheduleError, match="no pair schedule is called 3; .*give a function"):
        schedule(_model(), 3)  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="unknown streams='gpu'; choose one of 'auto', 'cuda', 'threads'"):
        schedule(_model(), streams="gpu")


def test_a_pair_schedule(tmp_path: Path) -> None:
    """What ``optimize_pair`` returns goes in as it is; a schedule of microbatches is told what a pair is."""
    model = _model()
    shape = ChunkPlan.build(model).shape
    with schedule(
        model, optimize_pair(shape, shape, CostModel.simple(computation=1.0, communication=1.0), max_states=10)
    ) as context:
        assert context is not None
    whole = schedules.serial(shape, 2)
    whole.save(tmp_path / "whole.txt")
    given: list[tuple[Any, str]] = [
        (whole, "this schedule is one of whole microbatches"),
        (tmp_path / "whole.txt", "whole.txt is one of whole microbatches"),
        (schedules.combined_1f1b, "schedules.combined_1f1b orders all microbatches"),
    ]
    for order, found in given:
        with pytest.raises(ScheduleError, match=f"{found}; a trainer's loop takes a pair, .* optimize --pair"):
            schedule(model, order)


def test_a_function_that_returns_no_schedule() -> None:
    """Said before the first step."""
    with pytest.raises(ArgumentError, match="schedule is 3"), schedule(_model(), lambda f, b: 3):  # type: ignore[arg-type, return-value]
        pass


@pytest.mark.parametrize("suffix", [".txt", ".json"])
def test_from_a_file(tmp_path: Path, suffix: str) -> None:
    """A saved pair schedule trains like the function that made it."""
    case = Case(name="file", bf16=True)
    model = Trainer(case).chunks[0]
    with schedule(model, "serial", wgrad="auto") as session:
        (chunk,) = session.chunks
        zipper(chunk.shape, chunk.shape).save(tmp_path / f"mine{suffix}")
    assert compare(case, [Way(order=str(tmp_path / f"mine{suffix}"), wgrad="auto")], 2) == []


def test_a_missing_file(tmp_path: Path) -> None:
    """A file that is not there."""
    with pytest.raises((OSError, ScheduleError)):
        schedule(_model(), tmp_path / "none.txt")


# Lifecycle hooks.


class _Shards:
    """An FSDP-like stand-in: a layer's parameters have storage only while somebody uses the layer."""

    def __init__(self, model: Any) -> None:
        self.layers = [*model.decoder.layers, *(model.mtp.layers if hasattr(model, "mtp") else ())]
        self.kept = {id(p): p.detach().clone() for layer in self.layers for p in layer.parameters()}
        self.users = {id(layer): 0 for layer in self.layers}
        self.gathers = 0
        self.most = 0
        for layer in self.layers:
            self._empty(layer)

    def gather(self, layer: Module) -> None:
        self.users[id(layer)] += 1
        if self.users[id(layer)] == 1:
            self.gathers += 1
            self.most = max(self.most, sum(users > 0 for users in self.users.values()))
            for parameter in layer.parameters():
                storage = parameter.untyped_storage()
                storage.resize_(self.kept[id(parameter)].untyped_storage().nbytes())
                storage.copy_(self.kept[id(parameter)].untyped_storage())

    def release(self, layer: Module) -> None:
        self.users[id(layer)] -= 1
        assert self.users[id(layer)] >= 0
        if self.users[id(layer)] == 0:
            self._empty(layer)

    def _empty(self, layer: Module) -> None:
        for parameter in layer.parameters():
            parameter.untyped_storage().resize_(0)

    def restore(self) -> None:
        assert not any(self.users.values())
        for layer in self.layers:
            self.gather(layer)


def _gradients(model: Any) -> dict[str, torch.Tensor]:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_gather_and_release(way: Way) -> None:
    """Layers whose parameters exist only between their hooks give the same gradients, under any schedule."""
    case = Case(name="shards", ddp=None, layers="MDM", mtp=1)
    plain = Trainer(case)
    plain.optimizer.step = lambda: None
    plain.run(PLAIN, 1)
    sharded = Trainer(case)
    sharded.optimizer.step = lambda: None
    shards = _Shards(sharded.chunks[0])
    hooks = LayerHooks(
        before_forward=shards.gather,
        after_forward=shards.release,
        before_backward=shards.gather,
        after_backward=shards.release,
    )
    sharded.run(way, 1, layer_hooks=hooks)
    most = shards.most
    shards.restore()
    expected, found = _gradients(plain.chunks[0]), _gradients(sharded.chunks[0])
    assert expected.keys() == found.keys()
    assert [name for name in expected if not torch.equal(expected[name], found[name])] == []
    if way.order == "serial":
        assert most == 1


def test_fsdp_hooks_of_megatron() -> None:
    """``get_layer(i).set_fsdp_reshard_hooks``: once for each layer and direction, with the transformer layer, the
    backward one after the layer's deferred weight gradients."""
    model = _model(mtp=1)
    log: list[tuple[str, int]] = []
    layers: list[Module] = [*model.decoder.layers, model.mtp.layers[0].mtp_model_layer]
    weights = [layer.self_attention.linear_proj.weight for layer in layers]

    def note(direction: str, module: Module) -> None:
        assert isinstance(module, TransformerLayer)
        index = [layer is module for layer in layers].index(True)
        assert (weights[index].grad is not None) is (direction == "backward")
        log.append((direction, index))

    with schedule(model, "combined_1f1b", wgrad="auto", streams="threads"):
        plan = _plan(model)
        assert plan.num_layers() == 3
        for index in range(plan.num_layers()):
            plan.get_layer(index).set_fsdp_reshard_hooks(partial(note, "forward"), partial(note, "backward"))
        with pytest.raises(IndexError):
            plan.get_layer(3)
        output = ChunkSchedulePlan.run(plan, None)
        assert log == [("forward", 0), ("forward", 1), ("forward", 2)]
        log.clear()
        ChunkSchedulePlan.run(None, plan, b_grad=torch.ones_like(output))
        assert log == [("backward", 2), ("backward", 1), ("backward", 0)]


@pytest.fixture(autouse=True)
def _seeded() -> Iterator[None]:
    torch.manual_seed(0)
    yield
