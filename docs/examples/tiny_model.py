"""What the examples share: a tiny Mixture-of-Experts model on this machine, and a comparison with the plain model."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from layernodes import LayerPlan, cpu_host, install  # first: it keeps quiet what Megatron-Core says when imported

# isort: split
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.transformer_config import TransformerConfig

TOKENS = torch.arange(16).reshape(2, 8) % 11


@contextmanager
def one_process() -> Iterator[None]:
    """A process group of this process alone, with Megatron-Core's groups made; without a GPU, under the CPU host."""
    with cpu_host(), tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{Path(folder) / 'store'}", rank=0, world_size=1)
        parallel_state.initialize_model_parallel()
        yield
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def make_model() -> Any:
    """Two MoE layers with a shared expert, seeded: two calls give equal models."""
    torch.manual_seed(1)
    model_parallel_cuda_manual_seed(1, force_reset_rng=True)
    config = TransformerConfig(
        num_layers=2,
        hidden_size=16,
        num_attention_heads=2,
        num_moe_experts=4,
        moe_router_topk=2,
        moe_ffn_hidden_size=16,
        moe_shared_expert_intermediate_size=16,
        moe_token_dispatcher_type="alltoall",
        hidden_dropout=0.0,
        attention_dropout=0.0,
        add_bias_linear=False,
        use_cpu_initialization=True,
        bias_dropout_fusion=False,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
        gradient_accumulation_fusion=False,
    )
    spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False)
    return GPTModel(
        config=config, transformer_layer_spec=spec, vocab_size=11, max_sequence_length=8, position_embedding_type="rope"
    ).train()


def run_plainly(model: Any) -> torch.Tensor:
    """Forward and backward of one microbatch, and the losses."""
    losses: torch.Tensor = model(TOKENS, torch.arange(8).expand(2, 8), None, labels=TOKENS)
    losses.sum().backward()
    return losses


def run_through_nodes(model: Any, build: Callable[[Any], LayerPlan]) -> torch.Tensor:
    """The same through Megatron-Core's own schedule plan, on the nodes of the plans that ``build`` makes."""
    with install(build):
        plan = model.build_schedule_plan(TOKENS, torch.arange(8).expand(2, 8), None, labels=TOKENS)
        losses: torch.Tensor = type(plan).run(plan, None)
        type(plan).run(None, plan, b_grad=torch.ones_like(losses))
    return losses


def compare(plain: Any, expected: torch.Tensor, nodes: Any, actual: torch.Tensor) -> None:
    """Print ``bitwise equal``, or the first tensor that differs."""
    pairs = {"losses": (expected, actual)}
    found = dict(nodes.named_parameters())
    pairs |= {f"gradient of {name}": (p.grad, found[name].grad) for name, p in plain.named_parameters()}
    differing = [name for name, (a, b) in pairs.items() if not torch.equal(a, b)]
    print(f"{differing[0]} differs" if differing else f"bitwise equal: losses and {len(pairs) - 1} gradients")
