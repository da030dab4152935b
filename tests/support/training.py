"""Training runs with Megatron-Core's own loop, DDP and optimizer: plainly, or under a schedule; the same data in
both."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.distributed.finalize_model_grads import finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_mtp_block_spec
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.multi_token_prediction import MTPLossAutoScaler
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import unwrap_model
from torch import Tensor
from torch.nn import Module

import layernodes
from layernodes.megatron import schedule
from tests.support.build import reset_globals
from tests.support.hybrid import stack_spec
from tests.support.timers import CountingTimers

SEQ, BATCH, VOCAB = 8, 2, 32


@dataclass(frozen=True, kw_only=True)
class Case:
    """One training configuration.

    Attributes:
        name: what it is called in reports.
        layers: ``M`` for a MoE layer, ``D`` for a dense one, over all pipeline stages.
        pattern: the layer pattern of a ``HybridModel``, without its MTP part; empty: the model is a ``GPTModel``.
        pp, vpp, ep: parallel sizes. mtp: MTP layers. tied: embedding and output layer share their weight.
        ddp: arguments of DDP's configuration; None: no DDP, and plain SGD.
        config: further configuration fields.
        masked: a loss mask with fractional weights, other on each microbatch. per_token: ``calculate_per_token_loss``.
        loss_scale: what ``grad_scale_func`` multiplies with.
        bind_sync: give the loop ``grad_sync_func`` and ``param_sync_func`` where DDP overlaps them.
        embeds: the forward step makes ``decoder_input``, with the model's embedding and an encoder that it holds.
    """

    name: str
    layers: str = "MM"
    pattern: str = ""
    pp: int = 1
    vpp: int | None = None
    ep: int = 1
    mtp: int = 0
    tied: bool = False
    bf16: bool = False
    ddp: Mapping[str, Any] | None = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    masked: bool = False
    per_token: bool = False
    loss_scale: float | None = None
    bind_sync: bool = False
    embeds: bool = False
    num_microbatches: int = 4
    seed: int = 5


@dataclass(frozen=True, kw_only=True)
class Way:
    """How to train: plainly where ``order`` is None; or in Megatron-Core's own combined 1F1B, under ``install()``."""

    order: str | Callable[..., layernodes.PairSchedule] | None = None
    wgrad: str = "off"
    streams: str = "inline"
    installed: bool = False

    def __str__(self) -> str:
        name = "install()" if self.installed else getattr(self.order, "__name__", self.order)
        return f"{name}, wgrad={self.wgrad}, {self.streams}"

    def context(self, chunks: Sequence[Module], **options: Any) -> AbstractContextManager[Any]:
        """What to train these chunks under; options as for ``schedule()``."""
        if self.installed:
            return _installed(chunks, delay_wgrad=self.wgrad == "auto")
        if self.order is None:
            return nullcontext()
        return schedule(chunks, self.order, wgrad=self.wgrad, streams=self.streams, **options)


@contextmanager
def _installed(chunks: Sequence[Module], *, delay_wgrad: bool) -> Iterator[None]:
    """``install()``, with Megatron-Core's flags set past its checks, which want bf16 and EP > 1."""
    configs = {id(config): config for c in chunks for m in c.modules() if (config := getattr(m, "config", None))}
    with ExitStack() as stack:
        for config in configs.values():
            stack.enter_context(mock.patch.object(config, "overlap_moe_expert_parallel_comm", True))
            stack.enter_context(mock.patch.object(config, "delay_wgrad_compute", delay_wgrad))
        stack.enter_context(layernodes.install())
        yield


PLAIN = Way()


def zipper(forward: layernodes.ChunkShape | None, backward: layernodes.ChunkShape | None) -> layernodes.PairSchedule:
    """A user's order that no built-in has: backward leads, step by step in turn, all weight gradients at the end."""
    whole = list(layernodes.pairs.serial(forward, backward))
    ahead = [step for step in whole if step.phase is layernodes.Phase.B]
    behind = [step for step in whole if step.phase is layernodes.Phase.F]
    steps = []
    for index in range(max(len(ahead), len(behind))):
        steps += ahead[index : index + 1] + behind[index : index + 1]
    return layernodes.pairs.deferred(layernodes.PairSchedule(steps), forward, backward, "end")


WAYS: Sequence[Way] = (
    Way(order="combined_1f1b", wgrad="auto", streams="threads"),
    Way(order="combined_1f1b"),
    Way(order="early_release", wgrad="auto"),
    Way(order="early_release", streams="threads"),
    Way(order="serial"),
    Way(order="serial", wgrad="auto"),
    Way(order=zipper, wgrad="auto", streams="threads"),
    Way(order=zipper),
)
"""Four orders, with and without deferred weight gradients, on threads and inline."""


@dataclass(frozen=True, kw_only=True)
class Trained:
    """What came of a run on this rank: losses (on the last stage); by chunk and name, the parameters, and the last
    step's gradients, whose differences an optimizer may round away; how often each of Megatron-Core's timers ran, apart
    from those of messages between stages: None under ``install()`` alone, where its own combined step does not time
    backwards; and how often each timer of messages ran."""

    losses: Sequence[Tensor]
    gradients: Mapping[str, Tensor]
    parameters: Mapping[str, Tensor]
    timers: Mapping[str, int] | None
    messages: Mapping[str, int]

    def difference(self, other: Trained) -> str | None:
        """What is not the same, bit for bit; None where all is."""
        if len(self.losses) != len(other.losses):
            return f"{len(self.losses)} losses and {len(other.losses)}"
        for index, (one, two) in enumerate(zip(self.losses, other.losses, strict=True)):
            if not torch.equal(one, two):
                return f"loss {index}: {one} and {two}"
        if None not in (self.timers, other.timers) and self.timers != other.timers:
            return f"timers {self.timers} and {other.timers}"
        if self.messages != other.messages:
            return f"messages {self.messages} and {other.messages}"
        for what in ("gradients", "parameters"):
            one, two = getattr(self, what), getattr(other, what)
            differing = [n for n in {**one, **two} if n not in one or n not in two or not torch.equal(one[n], two[n])]
            if differing:
                return f"{what} {differing[:4]} of {len(one)}"
        return None


class Trainer:
    """A model, its optimizer and its place in the data; what a user's training script holds."""

    def __init__(self, case: Case) -> None:
        use_layout(case)
        reset_globals(case.seed)
        # The training loop sets these, with a shape of its own; what a test before left must not stand in the way.
        MoEAuxLossAutoScaler.main_loss_backward_scale = None
        MTPLossAutoScaler.main_loss_backward_scale = torch.tensor(1.0)
        self.case = case
        self.config = make_config(case)
        self.config.timers = CountingTimers()
        self.config.barrier_with_L1_time = False
        self.chunks = [_make_chunk(case, self.config, stage) for stage in range(case.vpp or 1)]
        self._is_installed = False
        self.step = 0
        self.losses: list[Tensor] = []
        self._gradients: dict[str, Tensor] = {}
        if case.ddp is None:
            self.optimizer: Any = torch.optim.SGD([p for c in self.chunks for p in c.parameters()], lr=0.1)
        else:
            self._distribute(dict(case.ddp))

    def _distribute(self, ddp: dict[str, Any]) -> None:
        case, config = self.case, self.config
        ddp_config = DistributedDataParallelConfig(
            **{
                "grad_reduce_in_fp32": case.bf16,
                "bucket_size": 3000,
                "align_param_gather": case.bind_sync,
                **ddp,
            }
        )
        self.chunks = [
            DistributedDataParallel(config, ddp_config, chunk, disable_bucketing=index > 0 and not case.bind_sync)
            for index, chunk in enumerate(self.chunks)
        ]
        for chunk in self.chunks:
            chunk.broadcast_params()
        self.optimizer = get_megatron_optimizer(
            OptimizerConfig(
                optimizer="adam",
                lr=1e-2,
                weight_decay=0.01,
                clip_grad=1.0,
                bf16=case.bf16,
                params_dtype=config.params_dtype,
                use_distributed_optimizer=ddp_config.use_distributed_optimizer,
                overlap_param_gather=ddp_config.overlap_param_gather,
            ),
            self.chunks,
            use_gloo_process_groups=False,
        )
        config.finalize_model_grads_func = finalize_model_grads
        one = len(self.chunks) == 1
        if ddp_config.overlap_grad_reduce:
            no_sync = [chunk.no_sync for chunk in self.chunks]
            config.no_sync_func = no_sync[0] if one else no_sync
            if case.bind_sync:
                sync = [chunk.start_grad_sync for chunk in self.chunks]
                config.grad_sync_func = sync[0] if one else sync
        if ddp_config.overlap_param_gather and case.bind_sync:
            gather = [chunk.start_param_sync for chunk in self.chunks]
            config.param_sync_func = gather[0] if one else gather

    def run(self, way: Way, steps: int, *, forward_only: bool = False, **options: Any) -> None:
        """Take ``steps`` training steps, or evaluate ``steps`` batches."""
        case = self.case
        self._is_installed |= way.installed
        with way.context(self.chunks, **options):
            for _ in range(steps):
                if not forward_only:
                    for chunk in self.chunks:
                        if case.ddp is not None:
                            chunk.zero_grad_buffer()
                    self.optimizer.zero_grad()
                data = list(_microbatches(case, self.step))
                one = len(self.chunks) == 1
                self.losses += get_forward_backward_func()(
                    forward_step_func=partial(forward_step, case),
                    data_iterator=iter(data) if one else [iter(data) for _ in self.chunks],
                    model=self.chunks[0] if one else self.chunks,
                    num_microbatches=case.num_microbatches,
                    seq_length=SEQ,
                    micro_batch_size=BATCH,
                    forward_only=forward_only,
                )
                if not forward_only:
                    self._gradients = dict(self._find_gradients())
                    self.optimizer.step()
                self.step += 1

    def _find_gradients(self) -> Iterator[tuple[str, Tensor]]:
        for index, chunk in enumerate(self.chunks):
            for name, parameter in chunk.named_parameters():
                gradient = parameter.grad if self.case.ddp is None else parameter.main_grad
                if gradient is not None:
                    yield f"{index}.{name}", gradient.detach().clone()

    def trained(self) -> Trained:
        """What came of it so far."""
        if self.case.ddp is not None and self.case.ddp.get("overlap_param_gather"):
            for chunk in self.chunks:
                chunk.start_param_sync(force_sync=True)
        return Trained(
            losses=list(self.losses),
            gradients=dict(self._gradients),
            parameters={
                f"{index}.{name}": value.detach().clone()
                for index, chunk in enumerate(self.chunks)
                for name, value in chunk.named_parameters()
            },
            timers=None if self._is_installed else self.config.timers.others,
            messages=self.config.timers.messages,
        )

    def checkpoint(self) -> dict[str, Any]:
        """Everything that another ``Trainer`` of the same case needs to go on from here."""
        from megatron.core.tensor_parallel.random import get_cuda_rng_tracker  # noqa: PLC0415

        return copy.deepcopy(
            {
                "chunks": [chunk.state_dict() for chunk in self.chunks],
                "optimizers": [
                    (inner.state_dict(), [p.detach() for group in inner.param_groups for p in group["params"]])
                    for inner in self._optimizers()
                ],
                "step": self.step,
                "rng": torch.get_rng_state(),
                "tracker": get_cuda_rng_tracker().get_states(),
            }
        )

    def _optimizers(self) -> list[Any]:
        """Torch's optimizers; in mixed precision or sharded, they hold parameters of their own."""
        if self.case.ddp is None:
            return [self.optimizer]
        parts = getattr(self.optimizer, "chained_optimizers", [self.optimizer])
        return [part.optimizer for part in parts]

    def resume(self, checkpoint: Mapping[str, Any]) -> None:
        """Go on from a checkpoint."""
        from megatron.core.tensor_parallel.random import get_cuda_rng_tracker  # noqa: PLC0415

        for chunk, state in zip(self.chunks, checkpoint["chunks"], strict=True):
            chunk.load_state_dict(state)
        for inner, (state, values) in zip(self._optimizers(), checkpoint["optimizers"], strict=True):
            inner.load_state_dict(state)
            held = [p for group in inner.param_groups for p in group["params"]]
            for parameter, value in zip(held, values, strict=True):
                parameter.data.copy_(value)
        self.step = checkpoint["step"]
        torch.set_rng_state(checkpoint["rng"])
        get_cuda_rng_tracker().set_states(checkpoint["tracker"])


def train(case: Case, way: Way, steps: int) -> Trained:
    """A whole run from scratch."""
    trainer = Trainer(case)
    trainer.run(way, steps)
    return trainer.trained()


def compare(case: Case, ways: Sequence[Way], steps: int) -> list[str]:
    """Train plainly and each way; what differs, on this rank."""
    plain = train(case, PLAIN, steps)
    runs: dict[str, Trained] = {}
    if case.vpp and not case.pattern:  # Megatron-Core has no combined step for a HybridModel
        # With its overlap on, Megatron-Core's interleaved loop warms up one microbatch longer, so its messages pair up
        # in another way than plainly. Its own combined step says how.
        own = Way(installed=True)
        runs[str(own)] = train(case, own, steps)
        plain = replace(plain, messages=runs[str(own)].messages)
    runs |= {str(way): train(case, way, steps) for way in ways}
    differences = {name: plain.difference(run) for name, run in runs.items()}
    found = [f"{case.name} ({name}): {difference}" for name, difference in differences.items() if difference]
    if dist.get_rank() == dist.get_world_size() - 1 and not (
        len(plain.losses) == steps * case.num_microbatches and torch.stack(plain.losses).isfinite().all()
    ):
        found.append(f"{case.name}: the plain run has {len(plain.losses)} losses, or losses that are not finite")
    return found


def compare_all(cases: Sequence[tuple[Case, int]], ways: Sequence[Way]) -> list[str]:
    """``compare`` of each case, with its number of steps."""
    return [line for case, steps in cases for line in compare(case, ways, steps)]


def compare_resumed(case: Case, changes: Sequence[tuple[Way, Way]], steps: int) -> list[str]:
    """Train plainly, and in two halves from one way to another over a checkpoint; what differs, on this rank."""
    plain = train(case, PLAIN, 2 * steps)
    found = []
    for before, after in changes:
        first = Trainer(case)
        first.run(before, steps)
        buffer = io.BytesIO()
        torch.save(first.checkpoint(), buffer)
        buffer.seek(0)
        second = Trainer(replace(case, seed=case.seed + 1))
        second.case = case
        second.resume(torch.load(buffer, weights_only=False))
        second.run(after, steps)
        whole = second.trained()
        timers = CountingTimers(first.config.timers.counts + second.config.timers.counts)
        whole = replace(whole, losses=[*first.losses, *whole.losses], timers=timers.others, messages=timers.messages)
        difference = plain.difference(whole)
        if difference is not None:
            found.append(f"{case.name} ({before} to {after}): {difference}")
    return found


def compare_in_contexts(case: Case, ways: Sequence[Way]) -> list[str]:
    """Train two steps plainly, and each in a context of its own; what differs, on this rank.

    In the second context DDP's buckets are ready in the middle of backward from the first microbatch on.
    """
    plain = train(case, PLAIN, 2)
    found = []
    for way in ways:
        trainer = Trainer(case)
        for _ in range(2):
            trainer.run(way, 1)
        difference = plain.difference(trainer.trained())
        if difference is not None:
            found.append(f"{case.name} ({way}): {difference}")
    return found


def forward_step(case: Case, data: Iterator[Any], model: Any, return_schedule_plan: bool = False) -> Any:
    """As in a Megatron-Core training script."""
    tokens, positions, labels, mask = next(data)
    run = model.build_schedule_plan if return_schedule_plan else model
    given = {}
    inner = unwrap_model(model)
    if case.embeds and inner.pre_process:
        images = torch.nn.functional.one_hot(labels, VOCAB).transpose(0, 1).to(inner.encoder.weight.dtype)
        given["decoder_input"] = inner.embedding(tokens, positions) + inner.encoder(images)
    output = run(tokens, positions, None, labels=labels, loss_mask=mask, **given)
    return output, partial(_loss, case, mask)


def _loss(case: Case, mask: Tensor, output: Tensor) -> tuple[Any, ...]:
    losses = output.float() * mask
    if case.per_token:
        total, tokens = losses.sum(), mask.sum().int()
        return total, tokens, total.detach().clone() / tokens
    loss = losses.sum() / mask.sum()
    return loss, loss.detach().clone()


def _microbatches(case: Case, step: int) -> Iterator[tuple[Tensor, ...]]:
    rank = parallel_state.get_data_parallel_rank()
    generator = torch.Generator().manual_seed(case.seed + 1000 * step + 100_000 * rank)
    for _ in range(case.num_microbatches):
        tokens = torch.randint(VOCAB, (BATCH, SEQ), generator=generator)
        labels = torch.randint(VOCAB, (BATCH, SEQ), generator=generator)
        mask = torch.ones(BATCH, SEQ)
        if case.masked:
            weights = torch.rand(BATCH, SEQ, generator=generator)  # no bfloat16 numbers
            mask = weights * (weights < 0.7)
            mask[0, 0] = 0.3
        yield tokens, torch.arange(SEQ).expand(BATCH, SEQ).contiguous(), labels, mask


def make_config(case: Case) -> TransformerConfig:
    """The case's configuration."""
    dtype = torch.bfloat16 if case.bf16 else torch.float32
    config = TransformerConfig(
        **{
            "num_layers": len(case.pattern.replace("|", "") or case.layers),
            "hidden_size": 16,
            "num_attention_heads": 2,
            "ffn_hidden_size": 24,
            "hidden_dropout": 0.1,
            "attention_dropout": 0.1,
            "add_bias_linear": False,
            "num_moe_experts": 2 * case.ep,
            "moe_layer_freq": 1 if case.pattern else [int(letter == "M") for letter in case.layers],
            "moe_ffn_hidden_size": 16,
            "moe_router_topk": 2,
            "moe_router_load_balancing_type": "aux_loss",
            "moe_aux_loss_coeff": 1e-2,
            "moe_token_dispatcher_type": "alltoall",
            "mtp_num_layers": case.mtp or None,
            "mtp_loss_scaling_factor": 0.1 if case.mtp else None,
            "pipeline_model_parallel_size": case.pp,
            "virtual_pipeline_model_parallel_size": case.vpp,
            "expert_model_parallel_size": case.ep,
            # On two stages Megatron-Core mixes up forward and backward messages without this.
            "overlap_p2p_comm": case.vpp is not None,
            "batch_p2p_comm": case.vpp is None,
            "pipeline_dtype": dtype,
            "params_dtype": dtype,
            "bf16": case.bf16,
            "calculate_per_token_loss": case.per_token,
            "use_cpu_initialization": True,
            "bias_dropout_fusion": False,
            "bias_activation_fusion": False,
            "masked_softmax_fusion": False,
            "apply_rope_fusion": False,
            "persist_layer_norm": False,
            "gradient_accumulation_fusion": False,
            **case.config,
        }
    )
    if case.loss_scale is not None:
        config.grad_scale_func = partial(_times, case.loss_scale)
    return config


def _times(factor: float, loss: Tensor) -> Tensor:
    return loss * factor


def _make_chunk(case: Case, config: TransformerConfig, stage: int) -> Module:
    vp_stage = stage if case.vpp else None
    ends = {"ignore_virtual": False, "vp_stage": vp_stage}
    common = {
        "config": config,
        "vocab_size": VOCAB,
        "max_sequence_length": SEQ,
        "pre_process": parallel_state.is_pipeline_first_stage(**ends),
        "post_process": parallel_state.is_pipeline_last_stage(**ends),
        "position_embedding_type": "rope",
        "share_embeddings_and_output_weights": case.tied,
        "vp_stage": vp_stage,
    }
    model = _make_hybrid(case, common) if case.pattern else _make_gpt(case, common)
    if case.embeds and common["pre_process"]:
        model.encoder = torch.nn.Linear(VOCAB, config.hidden_size)
    if case.bf16:
        model.bfloat16()
        model = Float16Module(config, model)
    return model.train()


def _make_gpt(case: Case, common: Mapping[str, Any]) -> Module:
    options = {"use_transformer_engine": False, "vp_stage": common["vp_stage"]}
    block = get_gpt_decoder_block_spec(common["config"], **options)
    mtp = get_gpt_mtp_block_spec(common["config"], block, **options) if case.mtp else None
    return GPTModel(transformer_layer_spec=block, mtp_block_spec=mtp, **common)


def _make_hybrid(case: Case, common: Mapping[str, Any]) -> Module:
    pattern = "/".join([case.pattern, *["*E"] * case.mtp])
    return HybridModel(hybrid_stack_spec=stack_spec(common["config"]), hybrid_layer_pattern=pattern, **common)


def use_layout(case: Case) -> None:
    """Make Megatron's groups for the case, unless they are there already."""
    wanted = (case.pp, case.vpp, case.ep)
    if parallel_state.model_parallel_is_initialized():
        if _layout() == wanted:
            return
        parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        pipeline_model_parallel_size=case.pp,
        virtual_pipeline_model_parallel_size=case.vpp,
        expert_model_parallel_size=case.ep,
        create_gloo_process_groups=False,
    )


def _layout() -> tuple[int, int | None, int]:
    return (
        parallel_state.get_pipeline_model_parallel_world_size(),
        parallel_state.get_virtual_pipeline_model_parallel_world_size(),
        parallel_state.get_expert_model_parallel_world_size(),
    )
