"""What may stand around a model, and what may not: wrappers whose work is lost, and torch's FSDP."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    TorchFullyShardedDataParallel,
)
from megatron.core.transformer.module import Float16Module
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard

import layernodes
from layernodes import ChunkPlan, LayerPlan, UnsupportedLayerError
from layernodes._megatron import wrappers
from layernodes._megatron.constraints import training_violations
from tests.support.build import make_microbatches, make_model
from tests.support.configs import Cell
from tests.support.fixtures import MEGATRON_WORLD, megatron_world  # noqa: F401
from tests.support.hybrid_cells import hybrid_cell

pytestmark = MEGATRON_WORLD

_CELLS = {"gpt": Cell(name="wrapped", layers="MD", num_microbatches=1), "hybrid": hybrid_cell("*E")}


class _Doubling(nn.Module):
    """A wrapper of a user's own."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, **arguments: Any) -> Any:
        return 2 * self.module(**arguments)


def _float16(module: nn.Module, model: Any) -> Float16Module:
    model.config.bf16 = True
    return Float16Module(model.config, module)


def _refused(model: Any, match: str, field: str) -> None:
    """By a chunk plan and, with the same text, under ``schedule()``."""
    with pytest.raises(UnsupportedLayerError, match=match) as caught:
        ChunkPlan.build(model)
    assert caught.value.field == field
    (violation,) = training_violations([model], delay_wgrad=False)
    assert (violation.field, violation.value, violation.reason) == (field, caught.value.value, str(caught.value))


@pytest.mark.parametrize("cell", _CELLS)
@pytest.mark.parametrize(
    "wrap, name",
    [
        (nn.parallel.DistributedDataParallel, r"torch\.nn\.parallel\.distributed\.DistributedDataParallel"),
        (_Doubling, r"tests\.megatron\.test_wrappers\._Doubling"),
        (lambda model: _Doubling(_float16(model, model)), r"tests\.megatron\.test_wrappers\._Doubling"),
        (lambda model: _float16(_Doubling(model), model), r"tests\.megatron\.test_wrappers\._Doubling"),
    ],
)
def test_unknown_wrappers(cell: str, wrap: Callable[[Any], nn.Module], name: str) -> None:
    """Named, with what to use instead, wherever in the chain they are."""
    model = make_model(_CELLS[cell])
    kind = type(model).__name__
    _refused(wrap(model), rf"{name} wraps the {kind}, .* Megatron-Core's DistributedDataParallel", "model")


def test_a_known_wrapper_with_a_forward_of_its_own() -> None:
    """On the object, or in a subclass, it is lost as any other."""
    model = make_model(_CELLS["gpt"])
    wrapped = _float16(model, model)
    assert ChunkPlan.build(wrapped).model is model
    wrapped.forward = lambda **_: None
    _refused(wrapped, r"Float16Module overrides forward\(\).* a submodule of the GPTModel", "Float16Module.forward")


def test_known_wrappers() -> None:
    """One in the other, and a subclass that adds to the constructor alone."""
    model = make_model(_CELLS["gpt"])
    wrapped = DistributedDataParallel(model.config, DistributedDataParallelConfig(), _float16(model, model))
    wrapped.__class__ = type("Own", (DistributedDataParallel,), {})
    assert ChunkPlan.build(wrapped).model is model
    assert training_violations([wrapped], delay_wgrad=False) == ()


def test_megatrons_fsdp_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its wrapper, by a stand-in; what it may be is checked under ``schedule()``."""
    model = make_model(_CELLS["gpt"])
    wrapped = _Doubling(model)
    monkeypatch.setattr(wrappers, "find_megatron_fsdp", lambda found: found if found is wrapped else None)
    assert ChunkPlan.build(wrapped).model is model


def test_nothing_wrapped() -> None:
    """Not a model at all."""
    with pytest.raises(UnsupportedLayerError, match="Linear is no GPTModel and no HybridModel and wraps none"):
        ChunkPlan.build(nn.Linear(1, 1))
    with pytest.raises(UnsupportedLayerError, match="_Doubling is no GPTModel and no HybridModel and wraps none"):
        ChunkPlan.build(_Doubling(nn.Linear(1, 1)))


@pytest.mark.parametrize("cell", _CELLS)
@pytest.mark.parametrize(
    "place, where",
    [
        ("", r"the module \(FSDP\w+Model\)"),
        ("embedding", r"embedding \(FSDP"),
        ("decoder.layers.0", r"decoder.layers.0 \(FSDP"),
        ("decoder.layers.1.mlp", r"decoder.layers.1.mlp \(FSDP"),
    ],
)
def test_fully_shard(cell: str, place: str, where: str) -> None:
    """FSDP2 on the model or any part of it: refused, with the place, before anything runs."""
    model = make_model(_CELLS[cell])
    fully_shard(model.get_submodule(place), mesh=init_device_mesh("cpu", (1,)))
    _refused(model, f"{where}.* is sharded by torch's FSDP.* Megatron-Core's DistributedDataParallel", "fully_shard")


def test_fully_shard_without_a_chunk_plan() -> None:
    """A layer's own plan, and the model under ``install()``."""
    model, (microbatch,) = make_model(_CELLS["gpt"]), make_microbatches(_CELLS["gpt"])
    layer = model.decoder.layers[1]
    fully_shard(layer, mesh=init_device_mesh("cpu", (1,)))
    with pytest.raises(UnsupportedLayerError, match=r"the module \(FSDPTransformerLayer\) is sharded by torch's FSDP"):
        LayerPlan.build(layer)
    with layernodes.install(), pytest.raises(UnsupportedLayerError, match="is sharded by torch's FSDP"):
        plan = model.build_schedule_plan(**microbatch.inputs)
        type(plan).run(plan, None)


def test_wrapping_fsdp() -> None:
    """FSDP1, and Megatron-Core's wrapper around FSDP2 (made without its constructor, which wants an accelerator)."""
    model = make_model(_CELLS["gpt"])
    wrapped = TorchFullyShardedDataParallel.__new__(TorchFullyShardedDataParallel)
    nn.Module.__init__(wrapped)
    wrapped.module = model
    _refused(wrapped, r"the module \(TorchFullyShardedDataParallel\) is sharded by torch's FSDP", "fully_shard")
    strategy = ShardingStrategy.NO_SHARD  # all that a world of one rank has
    wrapped = FullyShardedDataParallel(model, sharding_strategy=strategy, device_id=torch.device("cpu"))
    _refused(wrapped, r"the module \(FullyShardedDataParallel\) is sharded by torch's FSDP", "fully_shard")
