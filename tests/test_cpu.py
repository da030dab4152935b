"""The CPU host: what it puts in place, and that nothing of it stays."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
from megatron.core.fusions.fused_bias_swiglu import swiglu
from megatron.core.models.common.embeddings.rope_utils import get_pos_emb_on_this_cp_rank
from megatron.core.tensor_parallel import random as megatron_random
from megatron.core.transformer.moe import moe_layer, moe_utils, shared_experts, token_dispatcher
from torch._dynamo import trace_rules
from torch.utils._device import _device_constructors

import layernodes.cpu
from layernodes._cpu_device import share_storage
from layernodes._cpu_linear import HostLinear
from layernodes.cpu import cpu_host
from layernodes.errors import NodeStateError, UnsupportedLayerError
from tests.support.build import make_microbatches, make_model
from tests.support.compare import run_cell
from tests.support.configs import CELLS, Cell, by_name
from tests.support.configurations import Results
from tests.support.world import MEGATRON, load_context, run_cells, single_process_world

_TOUCHED = (
    torch,
    torch.Tensor,
    torch.cuda,
    torch.cuda.random,
    megatron_random,
    moe_layer,
    moe_utils,
    token_dispatcher,
    token_dispatcher.MoEAlltoAllTokenDispatcher,
    shared_experts.SharedExpertMLP,
    logging.getLogger(megatron_random.__name__),
)

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the host does nothing where there is a GPU")


@pytest.fixture
def hosted() -> Iterator[None]:
    """A host and a one-process world for one test."""
    with cpu_host(), single_process_world():
        yield


def _attributes() -> list[dict[str, Any]]:
    return [dict(vars(target)) for target in _TOUCHED]


def _assert_same(before: list[dict[str, Any]], after: list[dict[str, Any]]) -> None:
    for target, old, new in zip(_TOUCHED, before, after, strict=True):
        assert old.keys() == new.keys(), target
        assert [name for name in old if old[name] is not new[name]] == [], target


def test_everything_is_restored() -> None:
    """Every attribute of every touched module, class and logger is the same object as before."""
    before = _attributes()
    host = cpu_host()
    with host:
        assert host.active
        assert _attributes() != before
    assert not host.active
    _assert_same(before, _attributes())


def test_everything_is_restored_after_an_exception() -> None:
    """An exception inside passes through unchanged and leaves nothing patched."""
    before = _attributes()
    with pytest.raises(ZeroDivisionError), cpu_host():
        raise ZeroDivisionError
    _assert_same(before, _attributes())


def test_everything_is_restored_when_entering_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """A failure half way through the table undoes the first half."""
    before = _attributes()
    broken = mock.Mock(side_effect=ZeroDivisionError)
    monkeypatch.setattr(layernodes.cpu, "_moe_patches", broken)
    host = cpu_host()
    with pytest.raises(ZeroDivisionError):
        host.__enter__()
    assert not host.active
    _assert_same(before, _attributes())


def test_import_patches_nothing() -> None:
    """Outside a host the functions are torch's and Megatron's own."""
    assert torch.cuda.current_device.__module__ == "torch.cuda"
    assert megatron_random._get_cuda_rng_state.__module__ == megatron_random.__name__


def test_nesting_is_refused() -> None:
    """A second host, or the same one again, is refused with the way out, and the first stays in place."""
    with cpu_host() as host:
        with pytest.raises(NodeStateError, match=r"another cpu_host\(\) is already entered; enter one"):
            cpu_host().__enter__()
        with pytest.raises(NodeStateError, match=r"this cpu_host\(\) is already entered"):
            host.__enter__()
        assert host.active
        assert torch.cuda.current_device() == torch.device("cpu")


def test_leaving_without_entering_is_refused() -> None:
    """Leaving twice, or a host that was never entered, is refused."""
    host = cpu_host()
    with pytest.raises(NodeStateError, match="is not entered"):
        host.__exit__(None, None, None)
    with host:
        pass
    with pytest.raises(NodeStateError, match="is not entered"):
        host.__exit__(None, None, None)


def test_leaving_out_of_order_is_reported_and_restores() -> None:
    """A patch put over the host and still there when it is left: named in the error, and everything is restored."""
    before = _attributes()
    with pytest.raises(NodeStateError, match=r"torch\.zeros; leave in the reverse order"), cpu_host():
        torch.zeros = torch.ones
    _assert_same(before, _attributes())


def test_a_host_can_be_entered_again() -> None:
    """After it was left, the same object serves again."""
    host = cpu_host()
    for _ in range(2):
        with host:
            assert host.active


def test_a_default_device_works_inside_and_afterwards() -> None:
    """Torch looks its factories up once, at the first use of a default device, which may be inside."""
    _device_constructors.cache_clear()
    for context in (cpu_host(), nullcontext()):
        with context, torch.device("meta"):
            assert {torch.empty(1).device.type, torch.tensor(1).device.type} == {"meta"}


def test_nothing_happens_with_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where CUDA is available the host is inactive and no attribute changes."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    before = _attributes()
    with cpu_host() as host:
        assert not host.active
        _assert_same(before, _attributes())
        with pytest.raises(NodeStateError, match="already entered"):
            host.__enter__()
    _assert_same(before, _attributes())


@pytest.mark.parametrize("device", ["cuda", "cuda:0", 0, torch.device("cuda"), "cpu", None])
def test_factories_allocate_on_the_cpu(hosted: None, device: Any) -> None:
    """A CUDA device in any spelling means the CPU; another one stays what it is."""
    assert torch.zeros(2, device=device).device.type == "cpu"
    assert torch.tensor([1, 2], device=device).tolist() == [1, 2]
    assert torch.arange(3, device=device).cuda().tolist() == [0, 1, 2]
    assert torch.zeros(2, device="meta").device.type == "meta"


def test_no_memory_is_pinned(hosted: None) -> None:
    """Megatron-Core pins what it copies to the GPU: the rotary positions of a context-parallel rank, for one."""

    class Second:
        size, rank = staticmethod(lambda: 2), staticmethod(lambda: 1)

    part = get_pos_emb_on_this_cp_rank(torch.arange(8.0).reshape(8, 1, 1, 1), 0, Second)
    assert part.flatten().tolist() == [2, 3, 4, 5]
    assert torch.zeros(2, device="cuda", pin_memory=True).device.type == "cpu"


def test_streams_and_events(hosted: None) -> None:
    """The stand-ins answer as CUDA's do when all work is done; the current stream is a thread's own."""
    stream, default = torch.cuda.Stream(device="cuda", priority=-1), torch.cuda.current_stream()
    with torch.cuda.stream(stream):
        assert torch.cuda.current_stream() is stream
        assert torch.cuda.current_stream() != default
        with torch.cuda.stream(None):
            assert torch.cuda.current_stream() is stream
    assert torch.cuda.current_stream() is default is torch.cuda.default_stream()
    start, end = stream.record_event(), torch.cuda.Event(enable_timing=True)
    end.record(stream)
    for wait in (lambda: stream.wait_stream(default), lambda: stream.wait_event(end), end.wait, end.synchronize):
        wait()
    assert start.elapsed_time(end) >= 0
    assert start.query()
    assert stream.query()
    assert len(torch.cuda.Stream.priority_range()) == 2
    assert stream.record_event(end) is end
    torch.zeros(1).record_stream(stream)
    torch.cuda.synchronize()


def test_tracker_states_differ_and_advance(hosted: None, caplog: pytest.LogCaptureFixture) -> None:
    """Each tracker state draws its own numbers, goes on where it stopped, and leaves the default generator alone."""
    megatron_random.model_parallel_cuda_manual_seed(7, force_reset_rng=True)
    tracker = megatron_random.get_cuda_rng_tracker()
    torch.manual_seed(1)
    default = torch.rand(4)

    def draw(name: str) -> torch.Tensor:
        with tracker.fork(name):
            return torch.rand(4)

    names = sorted(tracker.get_states())
    torch.manual_seed(1)
    draws = [draw(name) for name in names * 2]
    assert torch.equal(torch.rand(4), default)
    assert len(names) == 3
    assert len({tuple(values.tolist()) for values in draws}) == 6
    assert caplog.records == []


def test_dropout_masks_differ_between_tracker_states(hosted: None) -> None:
    """Dropout in a fork is not dropout outside, and seeding again repeats both."""

    def masks() -> list[torch.Tensor]:
        megatron_random.model_parallel_cuda_manual_seed(7, force_reset_rng=True)
        with megatron_random.get_cuda_rng_tracker().fork():
            inside = torch.nn.functional.dropout(torch.ones(64))
        return [inside, torch.nn.functional.dropout(torch.ones(64))]

    first, second = masks(), masks()
    assert not torch.equal(*first)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_graph_safe_tracker(hosted: None) -> None:
    """A tracker whose states are generators forks and advances like one whose states are tensors."""
    draws = []
    for graph_safe in (False, True):
        megatron_random.model_parallel_cuda_manual_seed(7, force_reset_rng=True, use_cudagraphable_rng=graph_safe)
        for _ in range(2):
            with megatron_random.get_cuda_rng_tracker().fork():
                draws.append(torch.rand(2).tolist())
    assert draws[:2] == draws[2:]
    megatron_random.model_parallel_cuda_manual_seed(7, force_reset_rng=True)


def test_checkpoint_without_output_restores_the_bits(hosted: None) -> None:
    """Discarded, recomputed in backward under its own dropout mask, seen by views, and accepted by autograd."""
    megatron_random.model_parallel_cuda_manual_seed(7, force_reset_rng=True)

    def run(*, discard: bool) -> list[torch.Tensor]:
        torch.manual_seed(3)
        x = torch.randn(4, 6).requires_grad_()
        weight = torch.randn(6, 6).requires_grad_()
        checkpoint = megatron_random.CheckpointWithoutOutput()
        function = lambda t: torch.nn.functional.dropout(torch.nn.functional.gelu(t), 0.5)  # noqa: E731
        hidden = checkpoint.checkpoint(function, x) if discard else function(x)
        out = hidden.view(2, 2, 6) @ weight
        if discard:
            checkpoint.discard_output_and_register_recompute(out)
            assert hidden.untyped_storage().nbytes() == 0
        out.square().sum().backward()
        assert x.grad is not None
        assert weight.grad is not None
        return [out.detach(), x.grad, weight.grad, torch.get_rng_state()]

    for plain, recomputed in zip(run(discard=False), run(discard=True), strict=True):
        assert torch.equal(plain, recomputed)


def test_share_storage_keeps_the_version() -> None:
    """The emptied storage holds the source's bytes, through every view, and no version counter moves."""
    dst, src = torch.zeros(3, 2), torch.randn(3, 2)
    view, version = dst[1:], dst._version
    dst.untyped_storage().resize_(0)
    share_storage(dst, src)
    assert torch.equal(view, src[1:])
    assert dst._version == version


def test_splits_become_numbers(hosted: None) -> None:
    """Counts asked for as numpy are copies in numpy; all else passes as it is."""
    counts = torch.tensor([1, 2])
    moved = token_dispatcher.maybe_move_tensor_to_cpu(counts, as_numpy=True)
    counts.zero_()
    assert moved.tolist() == [1, 2]
    assert token_dispatcher.maybe_move_tensor_to_cpu(counts) is counts
    assert token_dispatcher.maybe_move_tensor_to_cpu(None, as_numpy=True) is None


def test_nothing_is_compiled(hosted: None) -> None:
    """Megatron's functions under ``jit_fuser`` run eagerly, and torch's stance is what it was afterwards."""
    torch._dynamo.utils.counters.clear()
    swiglu(torch.randn(4, 8))
    assert torch._dynamo.utils.counters["frames"] == {}


@pytest.mark.parametrize("name", ["alltoall-dropout-ep1", "latent-ep1", "recompute-all-dropout-ep1", "mtp-aux-ep1"])
def test_a_model_trains_a_step(hosted: None, name: str) -> None:
    """A ``GPTModel`` with MoE layers goes forward and backward, and a step down its gradient lowers its loss."""
    cell = by_name(name).with_config(hidden_dropout=0.0, attention_dropout=0.0)
    model, microbatch = make_model(cell), make_microbatches(cell)[0]
    before = model(**microbatch.inputs).mean()
    before.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.sub_(parameter.grad, alpha=1e-2)
    assert model(**microbatch.inputs).mean() < before


def test_a_model_outlives_its_host() -> None:
    """Built under one host, used under the next: nothing it needs went away with the first."""
    cell = by_name("alltoall-shared-ep1")
    with cpu_host() as host, single_process_world(), torch.no_grad():
        model, inputs = make_model(cell), make_microbatches(cell)[0].inputs
        expected = model(**inputs)
        host.__exit__(None, None, None)
        with cpu_host():
            assert torch.equal(model(**inputs), expected)
        host.__enter__()


def test_the_harness_can_fail(hosted: None) -> None:
    """Megatron-Core's own plan is right, wrong and crashing where it is known to be."""
    own = load_context(MEGATRON)
    expected = {
        "hybridep-ep1": "right",
        "hybridep-mtp-ep1": "rounding",
        "hybridep-dense-last-ep1": "wrong",
        "alltoall-moe-ep1": "crash",
        "expert-bias-padding-ep1": "unrunnable",
    }
    found = {name: run_cell(by_name(name), own) for name in expected}
    assert {name: verdict.status for name, verdict in found.items()} == expected
    assert Results.load().contradicted(((by_name(name), v) for name, v in found.items()), "megatron") == {}
    wrong = found["hybridep-dense-last-ep1"]
    assert "output/0" in wrong.differing
    assert "grad/decoder.final_layernorm.weight" in wrong.differing
    hooks = run_cell(by_name("hybridep-ep1"), own, hooks=True)
    assert set(hooks.differing) == {"hooks/decoder", "hooks/decoder.layers.0"}


def test_two_processes_with_the_real_all_to_all() -> None:
    """Two gloo ranks run cells in one group; a cell that raises on both leaves the group usable."""
    cells = [by_name(name) for name in ("frozen-embedding-ep2", "alltoall-dropout-ep2", "mtp-two-ep2", "idle-rank")]
    verdicts = run_cells(cells, MEGATRON)
    assert Results.load().contradicted(((cell, verdicts[cell.name]) for cell in cells), "megatron") == {}
    assert [verdicts[cell.name].status for cell in cells] == ["crash", "right", "crash", "right"]


def test_cells_are_named_apart() -> None:
    """Names identify cells, and no cell needs more than two ranks."""
    assert len({cell.name for cell in CELLS}) == len(CELLS)
    assert all(isinstance(cell, Cell) and cell.world_size <= 2 for cell in CELLS)


def test_a_parallel_linear_of_transformer_engine_is_refused() -> None:
    """The stand-in for latent projections says what it has and what to use where another is asked for."""
    with pytest.raises(UnsupportedLayerError, match="parallel_mode='column'.*'duplicated' only; use Column") as caught:
        HostLinear(
            4,
            4,
            parallel_mode="column",
            config=None,
            init_method=torch.nn.init.zeros_,
            bias=False,
            skip_bias_add=False,
        )
    assert (caught.value.field, caught.value.value) == ("parallel_mode", "column")


def test_dynamo_starts_under_the_host() -> None:
    """Leaving a process group makes Dynamo forget torch's functions; it collects them anew, under the host too."""
    trace_rules.clear_lru_cache()
    try:
        with cpu_host():
            assert torch.compile(torch.neg)(torch.ones(1)).item() == -1.0
            assert trace_rules.get_torch_obj_rule_map.cache_info().currsize == 1
    finally:
        trace_rules.clear_lru_cache()
