"""Train a small byte-level MoE model with Megatron-Core's own loop, DDP and optimizer; plainly, or under a schedule.

    python train_bytes.py                                                       # one process, plainly
    python train_bytes.py --schedule combined_1f1b --wgrad auto                 # the same bits, in another order
    python train_bytes.py --model hybrid --pattern "*E*-" --schedule combined_1f1b    # attention, MoE and MLP layers
    torchrun --nproc-per-node 2 train_bytes.py --ep 2 --schedule early_release
    torchrun --nproc-per-node 4 train_bytes.py --pp 2 --vpp 2 --ep 2 --schedule mine.txt --mtp --tied

What layernodes adds to a Megatron-Core script is in ``scheduled`` and ``forward_step``: a context around the calls of
the training loop, and ``model.build_schedule_plan`` in place of ``model`` where the loop asks for it.
"""

from __future__ import annotations

import json
import logging
import sys
import warnings
from argparse import ArgumentDefaultsHelpFormatter, ArgumentParser, Namespace
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from importlib.resources import files
from pathlib import Path
from typing import Any

warnings.simplefilter("ignore")  # Megatron-Core's, of packages that a CPU does not have
logging.getLogger("megatron").setLevel(logging.ERROR)

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from bytes_gpt import batches, build_chunks, join_processes, make_config  # noqa: E402
from megatron.core import parallel_state  # noqa: E402
from megatron.core.distributed import (  # noqa: E402
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer  # noqa: E402
from megatron.core.pipeline_parallel import get_forward_backward_func  # noqa: E402
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker  # noqa: E402
from torch import Tensor  # noqa: E402

import layernodes  # noqa: E402


def read_options(arguments: list[str] | None = None) -> Namespace:
    """The command line."""
    parser = ArgumentParser(description=__doc__.split("\n")[0], formatter_class=ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add("--model", choices=["gpt", "hybrid"], default="gpt", help="class of the model: GPTModel or HybridModel")
    add("--pattern", help="layers of a hybrid model, | between pipeline stages (default: *E for each of --layers)")
    add("--schedule", help="a built-in pair schedule's name, or a .txt or .json file; without it, Megatron-Core's own")
    add("--wgrad", choices=["off", "auto"], default="off", help="auto: defer weight gradients")
    add("--streams", choices=["auto", "cuda", "threads", "inline"], default="auto")
    add("--text", type=Path, help="file whose bytes are the tokens (default: a chapter that comes with layernodes)")
    for name, value, what in (
        ("pp", 1, "pipeline stages"),
        ("vpp", None, "virtual stages of each pipeline stage"),
        ("ep", 1, "ranks that share the experts"),
        ("steps", 300, "training steps, those of the checkpoint included"),
        ("microbatches", 4, "microbatches of a step, on each rank"),
        ("batch", 4, "sequences of a microbatch"),
        ("seq", 64, "bytes of a sequence"),
        ("layers", 4, "decoder layers"),
        ("hidden", 64, "hidden size"),
        ("experts", 4, "experts of a layer"),
        ("seed", 1234, "seed of weights, data and dropout"),
    ):
        add(f"--{name}", type=int, default=value, help=what)
    add("--lr", type=float, default=3e-3, help="learning rate")
    add("--dropout", type=float, default=0.0)
    add("--bf16", action="store_true")
    add("--mtp", action="store_true", help="add a multi-token-prediction layer")
    add("--tied", action="store_true", help="one weight for the embedding and the output layer")
    add("--distributed-optimizer", action="store_true", help="shard the optimizer, overlap the reduction of gradients")
    add("--save", type=Path, metavar="DIR", help="write a checkpoint at the end")
    add("--load", type=Path, metavar="DIR", help="go on from a checkpoint")
    add("--json", action="store_true", help="print one JSON document at the end instead of lines")
    return parser.parse_args(arguments)


class Training:
    """Model chunks and optimizer, set up as for any training with Megatron-Core."""

    def __init__(self, options: Namespace) -> None:
        self.options = options
        config = make_config(options)
        ddp_config = DistributedDataParallelConfig(
            grad_reduce_in_fp32=options.bf16,
            overlap_grad_reduce=options.distributed_optimizer,
            use_distributed_optimizer=options.distributed_optimizer,
        )
        self.chunks = [
            DistributedDataParallel(config, ddp_config, chunk, disable_bucketing=index > 0)
            for index, chunk in enumerate(build_chunks(options, config))
        ]
        for chunk in self.chunks:
            chunk.broadcast_params()
        self.optimizer = get_megatron_optimizer(
            OptimizerConfig(
                optimizer="adam",
                lr=options.lr,
                clip_grad=1.0,
                bf16=options.bf16,
                params_dtype=config.params_dtype,
                use_distributed_optimizer=options.distributed_optimizer,
            ),
            self.chunks,
            use_gloo_process_groups=False,
        )
        config.finalize_model_grads_func = finalize_model_grads
        if options.distributed_optimizer:
            no_sync = [chunk.no_sync for chunk in self.chunks]
            config.no_sync_func = no_sync if options.vpp else no_sync[0]
        self.step = 0

    def scheduled(self) -> AbstractContextManager[Any]:
        """The context that the loop runs in."""
        options = self.options
        if options.schedule is None:
            return nullcontext()
        return layernodes.megatron.schedule(self.chunks, options.schedule, wgrad=options.wgrad, streams=options.streams)

    def train_step(self, text: bytes) -> float:
        """One step; the mean loss of all microbatches and ranks, known to all."""
        options = self.options
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        data = [batches(text, options, self.step) for _ in self.chunks]
        losses = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=data if options.vpp else data[0],
            model=self.chunks if options.vpp else self.chunks[0],
            num_microbatches=options.microbatches,
            seq_length=options.seq,
            micro_batch_size=options.batch,
        )
        self.optimizer.step()
        self.step += 1
        own = [sum(map(float, losses)), len(losses)]  # only the last stage has any
        total, count = all_ranks_sum(own)
        return total / count

    def save(self, folder: Path) -> None:
        """Write this rank's file."""
        folder.mkdir(parents=True, exist_ok=True)
        state = {
            "step": self.step,
            "chunks": [chunk.state_dict() for chunk in self.chunks],
            "optimizers": [(inner.state_dict(), own_parameters(inner)) for inner in self._optimizers()],
            "generator": torch.get_rng_state(),
            "tracker": get_cuda_rng_tracker().get_states(),
        }
        torch.save(state, folder / f"rank{dist.get_rank()}.pt")

    def load(self, folder: Path) -> None:
        """Go on from this rank's file."""
        state = torch.load(folder / f"rank{dist.get_rank()}.pt", weights_only=False)
        for chunk, of_chunk in zip(self.chunks, state["chunks"], strict=True):
            chunk.load_state_dict(of_chunk)
        for inner, (of_inner, values) in zip(self._optimizers(), state["optimizers"], strict=True):
            inner.load_state_dict(of_inner)
            for parameter, value in zip(own_parameters(inner), values, strict=True):
                parameter.copy_(value)
        self.step = state["step"]
        torch.set_rng_state(state["generator"])
        get_cuda_rng_tracker().set_states(state["tracker"])

    def _optimizers(self) -> list[torch.optim.Optimizer]:
        """Torch's, inside Megatron-Core's: one for the experts, one for the rest."""
        return [part.optimizer for part in getattr(self.optimizer, "chained_optimizers", [self.optimizer])]


def own_parameters(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """What an optimizer of torch works on: in mixed precision, or sharded, copies of the model's parameters."""
    return [parameter.detach() for group in optimizer.param_groups for parameter in group["params"]]


def forward_step(data: Iterator[dict[str, Tensor]], model: Any, return_schedule_plan: bool = False) -> Any:
    """What Megatron-Core's loop calls for each microbatch."""
    batch = next(data)
    run = model.build_schedule_plan if return_schedule_plan else model
    return run(batch["tokens"], batch["positions"], None, labels=batch["labels"]), mean_loss


def mean_loss(output: Tensor) -> tuple[Tensor, Tensor]:
    """The loss to go backward from, and what to report."""
    loss = output.float().mean()
    return loss, loss.detach().clone()


def all_ranks_sum(numbers: list[float]) -> list[float]:
    """The sum of each number over all ranks."""
    total = torch.tensor(numbers, dtype=torch.float64, device=torch.cuda.current_device())
    dist.all_reduce(total)
    return [float(number) for number in total]


def report(options: Namespace, step: int, loss: float) -> None:
    """One line a step; on a terminal a progress bar below."""
    if dist.get_rank() != 0:
        return
    bar = sys.stderr if sys.stderr.isatty() else None
    if bar is not None:
        bar.write("\r\x1b[K")
    if not options.json:
        print(f"step {step:4d}  loss {loss:.4f}", flush=True)
    if bar is not None and step < options.steps:
        filled = 30 * step // options.steps
        bar.write(f"[{'#' * filled}{'.' * (30 - filled)}] {step}/{options.steps}")
        bar.flush()


def main(arguments: list[str] | None = None) -> None:
    """Train, report, save."""
    options = read_options(arguments)
    text = (files("layernodes.demo") / "alice.txt").read_bytes() if options.text is None else options.text.read_bytes()
    with layernodes.cpu_host():  # does nothing where there is a GPU
        join_processes(options)
        training = Training(options)
        if options.load is not None:
            training.load(options.load)
        losses = []
        with training.scheduled():
            while training.step < options.steps:
                losses.append(training.train_step(text))
                report(options, training.step, losses[-1])
        if options.save is not None:
            training.save(options.save)
        if options.json and dist.get_rank() == 0:
            print(json.dumps({"schedule": options.schedule, "steps": training.step, "losses": losses}))
        dist.barrier()
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
