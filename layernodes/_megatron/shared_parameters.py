"""Parameters that several nodes of a chunk use: one gradient a microbatch, as in plain autograd.

Plain autograd sums the contributions of all uses within one backward, in the order in which they arrive, and adds the
sum to ``.grad`` once: g + ((a + b) + c). Nodes whose backwards run one by one would add them one by one,
((g + a) + b) + c, which rounds differently and fires hooks several times. So each such node works on a stand-in:

    forward of a node    its modules hold a stand-in leaf of the parameter, made for this node and microbatch
    backward of a node   the stand-in's gradient is added to the sum of its parameter
    last of them         the sum is delivered to the parameter, through autograd, so that its hooks fire once

Only parameters that more than one node uses have stand-ins: the embedding under MTP, tied embeddings, a repeated MTP
layer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final, final

from torch import Tensor
from torch.nn import Module, Parameter

from layernodes.wgrad import Site, deliver, replaced, stand_in_for

_ATTRIBUTE: Final = "layernodes_shared_gradients"


@final
@dataclass(frozen=True, kw_only=True)
class SharedParameters:
    """Where the nodes of one chunk hold parameters that several of them use.

    Attributes:
        pre_process, post_process: sites in the chunk's ends.
        mtp_first: sites in the first slot of each MTP layer (the embedding).
        mtp_all: sites in every slot of each MTP layer (a repeated layer's own).
    """

    pre_process: tuple[Site, ...] = ()
    post_process: tuple[Site, ...] = ()
    mtp_first: tuple[Site, ...] = ()
    mtp_all: tuple[Site, ...] = ()

    @staticmethod
    def of(model: Any) -> SharedParameters:
        """Find them in a ``GPTModel`` chunk."""
        depths = int(model.config.mtp_num_layers or 0) if getattr(model, "mtp", None) is not None else 0
        embedding = tuple(_sites(model.embedding)) if getattr(model, "embedding", None) is not None else ()
        tied: tuple[Site, ...] = ()
        if model.post_process and model.share_embeddings_and_output_weights:
            weight = model.shared_embedding_or_output_weight()
            tied = tuple(site for site in embedding if site.parameter is weight)
        repeated = depths > 1 and bool(model.config.mtp_use_repeated_layer)
        layer = tuple(_sites(model.mtp.layers[0])) if repeated else ()
        uses: Counter[int] = Counter()
        for sites, times in ((embedding, int(model.pre_process) + depths), (tied, 1), (layer, depths)):
            for site in sites:
                uses[id(site.parameter)] += times

        def shared(sites: tuple[Site, ...]) -> tuple[Site, ...]:
            return tuple(site for site in sites if uses[id(site.parameter)] > 1)

        return SharedParameters(
            pre_process=shared(embedding) if model.pre_process else (),
            post_process=shared(tied),
            mtp_first=shared(embedding) if depths else (),
            mtp_all=shared(layer),
        )


def _sites(module: Module) -> Iterator[Site]:
    for owner in module.modules():
        for name, parameter in owner._parameters.items():
            if parameter is not None and parameter.requires_grad:
                yield Site(owner, name, parameter)


def shared_sites(modules_of_nodes: Sequence[Sequence[Module]]) -> list[tuple[Site, ...]]:
    """For each node of a chunk, given its modules, where it holds parameters that another node uses too."""
    sites = [[site for module in modules for site in _sites(module)] for modules in modules_of_nodes]
    uses = Counter(key for of_node in sites for key in {id(site.parameter) for site in of_node})
    return [tuple(site for site in of_node if uses[id(site.parameter)] > 1) for of_node in sites]


@final
class StandIns:
    """The stand-ins of one node and microbatch."""

    __slots__ = ("_gradients", "_pairs")

    def __init__(self, gradients: SharedGradients, pairs: list[tuple[Parameter, Parameter]]) -> None:
        self._gradients = gradients
        self._pairs = pairs

    def totals(self) -> list[Tensor]:
        """The sums so far that ``collect`` will add to."""
        sums = (self._gradients.sums[id(parameter)].total for parameter, _ in self._pairs)
        return [total for total in sums if total is not None]

    def collect(self, later: Collection[int] = ()) -> None:
        """Hand the node's contributions on, after its backward; those to parameters with an id in ``later`` are
        kept."""
        pairs, self._pairs = self._pairs, []
        for parameter, stand_in in pairs:
            if id(parameter) in later:
                self._pairs.append((parameter, stand_in))
            else:
                self._gradients.add(parameter, stand_in)


@dataclass
class _Sum:
    parameter: Parameter
    outstanding: int = 0
    total: Tensor | None = None


@final
@dataclass
class SharedGradients:
    """The sums of one chunk and microbatch."""

    sums: dict[int, _Sum] = field(default_factory=dict)

    @contextmanager
    def standing_in(self, sites: tuple[Site, ...]) -> Iterator[StandIns]:
        """Hold stand-ins at ``sites`` for the forward of one node."""
        stand_ins: dict[int, tuple[Parameter, Parameter]] = {}
        swaps: list[tuple[Module, str, Parameter]] = []
        for site in sites:
            pair = stand_ins.get(id(site.parameter))
            if pair is None:
                pair = stand_ins[id(site.parameter)] = site.parameter, stand_in_for(site.parameter)
                self.sums.setdefault(id(site.parameter), _Sum(site.parameter)).outstanding += 1
            swaps.append((site.module, site.name, pair[1]))
        with replaced(swaps):
            yield StandIns(self, list(stand_ins.values()))

    def add(self, parameter: Parameter, stand_in: Parameter) -> None:
        """Add one node's contribution; the last one delivers the sum."""
        entry = self.sums[id(parameter)]
        entry.outstanding -= 1
        if stand_in.grad is not None:
            entry.total = stand_in.grad if entry.total is None else entry.total + stand_in.grad
        if getattr(stand_in, "grad_added_to_main_grad", False):
            parameter.grad_added_to_main_grad = True  # type: ignore[attr-defined]
        if entry.outstanding == 0:
            del self.sums[id(parameter)]
            if entry.total is not None:
                deliver(parameter, entry.total)


def shared_gradients_of(chunk_state: Any) -> SharedGradients:
    """The sums that ``chunk_state`` carries, made on first use."""
    try:
        gradients: SharedGradients = chunk_state.__dict__[_ATTRIBUTE]
    except KeyError:
        gradients = SharedGradients()
        setattr(chunk_state, _ATTRIBUTE, gradients)
    return gradients
