"""``enable_autocast`` in Megatron-Core's training loop, on a CPU with a stand-in for CUDA's autocast."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.amp import autocast_mode

from layernodes import install
from tests.support.fixtures import MEGATRON_WORLD, megatron_world  # noqa: F401
from tests.support.training import BATCH, PLAIN, SEQ, VOCAB, WAYS, Case, Trainer, Way, train

pytestmark = MEGATRON_WORLD


class _OnCpu(torch.autocast):
    """Megatron-Core asks for CUDA's autocast, and its linears remember whether that was on: here it is the CPU's."""

    def __init__(self, device_type: str, **options: Any) -> None:
        assert device_type in ("cuda", "cpu")
        super().__init__("cpu", **options)

    def __enter__(self) -> Any:
        self._outer = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
        torch.set_autocast_enabled("cuda", self._enabled)
        torch.set_autocast_dtype("cuda", self.fast_dtype)
        return super().__enter__()

    def __exit__(self, *error: Any) -> Any:
        torch.set_autocast_enabled("cuda", self._outer[0])
        torch.set_autocast_dtype("cuda", self._outer[1])
        return super().__exit__(*error)


@pytest.fixture(autouse=True)
def _on_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for owner in (torch, autocast_mode):
        monkeypatch.setattr(owner, "autocast", _OnCpu)
    yield
    assert not torch.is_autocast_enabled("cuda")


@pytest.mark.parametrize("way", [Way(installed=True), Way(installed=True, wgrad="auto"), *WAYS[:2]], ids=str)
def test_every_forward(way: Way) -> None:
    """As in the plain step; Megatron-Core's combined step enters it for building the plan only. Dense layers: the
    backward of Megatron-Core's router fails under autocast in fp32, in the plain model too."""
    config = {"enable_autocast": True, "autocast_dtype": torch.bfloat16}
    case = Case(name="autocast", layers="DD", ddp=None, mtp=1, config=config)
    plain, without = train(case, PLAIN, 2), train(replace(case, config={}), PLAIN, 2)
    assert plain.difference(without) is not None
    assert plain.difference(train(case, way, 2)) is None


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")  # the embedding's inputs are whole numbers
def test_the_runner_of_a_plan() -> None:
    """A plan runs forward under the autocast that it was built under, and no backward; other plans under none."""
    case = Case(name="by hand", layers="D", ddp=None)
    model = Trainer(case).chunks[0]
    tokens = torch.randint(VOCAB, (BATCH, SEQ))
    inputs = (tokens, torch.arange(SEQ).expand(BATCH, SEQ).contiguous(), None)
    seen: list[tuple[bool, bool]] = []
    layer = model.decoder.layers[0]
    for module in (model.embedding, layer.self_attention, layer.mlp, model.output_layer):
        module.register_forward_hook(lambda *_: seen.append((True, torch.is_autocast_enabled("cpu"))))
        module.register_full_backward_hook(lambda *_: seen.append((False, torch.is_autocast_enabled("cpu"))))
    with install():
        for enabled in (True, False):
            with torch.autocast("cuda", dtype=torch.bfloat16, enabled=enabled):
                plan = model.build_schedule_plan(*inputs)
            output = type(plan).run(plan, None)
            type(plan).run(None, plan, b_grad=torch.ones_like(output))
            assert seen == [(True, enabled)] * 4 + [(False, False)] * 4
            seen.clear()
