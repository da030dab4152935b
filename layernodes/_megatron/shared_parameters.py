"""Parameters that several nodes of a chunk use: one gradient a microbatch, as in plain autograd.

Plain autograd sums the contributions of all uses within one backward, in the order in which they arrive, and adds the
sum to ``.grad`` once: g + ((a + b) + c). Nodes whose backwards run one by one would add them one by one,
((g + a) + b) + c, which rounds differently and fires hooks several times. So each such node works on a stand-in:

    forward of a node    its modules hold a stand-in leaf of the parameter, made for this node and microbatch
    backward of a node   begins with the parameter's sum as the stand-in's gradient, and adds to it
    its W                adds what it computes one by one, once the nodes that backward comes to before have done so
    last of them         the sum is delivered to the parameter, through autograd, so that its hooks fire once; or kept,
                         for whoever runs a graph from outside of the chunk that may use the parameter too

Only parameters that more than one node uses have stand-ins: the embedding under MTP, tied embeddings, a repeated MTP
layer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final, final

from torch import Tensor
from torch.nn import Module, Parameter

from layernodes.stand_in import Site, deliver, keeping_parts, parts_of, replaced, stand_in_for
from layernodes.state import carried

_ATTRIBUTE: Final = "layernodes_shared_gradients"
_PARAMETERS: Final = "layernodes_shared_parameters"


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
        """Find them in a chunk of a ``GPTModel`` or ``HybridModel``."""
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


def shared_parameters_of(chunk_state: Any) -> SharedParameters:
    """Those of the model that ``chunk_state`` names, looked for once a microbatch: all its nodes ask."""
    return carried(chunk_state, _PARAMETERS, lambda: SharedParameters.of(chunk_state.model))


def _sites(module: Module) -> Iterator[Site]:
    for owner in module.modules():
        for name, parameter in owner._parameters.items():
            if parameter is not None:  # frozen ones too: they may be trained later under the same plan
                yield Site(owner, name, parameter)


def shared_sites(modules_of_nodes: Sequence[Sequence[Module]]) -> list[tuple[Site, ...]]:
    """For each node of a chunk, given its modules, where it holds parameters that another node uses too."""
    sites = [[site for module in modules for site in _sites(module)] for modules in modules_of_nodes]
    uses = Counter(key for of_node in sites for key in {id(site.parameter) for site in of_node})
    return [tuple(site for site in of_node if uses[id(site.parameter)] > 1) for of_node in sites]


@final
@dataclass
class _Use:
    """One node's use of a shared parameter; ``planned`` is the id of that in whose place it was when planned."""

    entry: _Sum
    number: int
    planned: int
    stand_in: Parameter
    is_seeded: bool = False


@dataclass
class _Sum:
    """The contributions to one parameter: of the node that went forward last first, as backward makes them."""

    parameter: Parameter
    uses: int = 0
    summed: int = 0
    waiting: dict[int, list[Tensor]] = field(default_factory=dict)
    total: Tensor | None = None

    def is_next(self, number: int) -> bool:
        """Whether all uses that come before this one in backward have been summed."""
        return number == self.uses - 1 - self.summed

    def add(self, use: _Use) -> None:
        """Note one use's contributions and sum what is next."""
        stand_in = use.stand_in
        if getattr(stand_in, "grad_added_to_main_grad", False):
            self.parameter.grad_added_to_main_grad = True  # type: ignore[attr-defined]  # Megatron-Core's, not torch's
        contributions = parts_of(stand_in)
        if stand_in.grad is not None:
            if use.is_seeded:
                self.total = None  # it is in the gradient
            contributions = [stand_in.grad, *contributions]
        self.waiting[use.number] = contributions
        while (number := self.uses - 1 - self.summed) in self.waiting:
            for one in self.waiting.pop(number):
                self.total = one if self.total is None else self.total + one
            self.summed += 1


@final
class StandIns:
    """The stand-ins of one node and microbatch."""

    __slots__ = ("_gradients", "_uses")

    def __init__(self, gradients: SharedGradients, uses: list[_Use]) -> None:
        self._gradients = gradients
        self._uses = uses

    def totals(self) -> list[Tensor]:
        """The sums so far that ``collect`` will add to, and what waits to be added."""
        entries = [use.entry for use in self._uses]
        sums = [entry.total for entry in entries if entry.total is not None]
        return sums + [one for entry in entries for waiting in entry.waiting.values() for one in waiting]

    def seeds(self, later: Collection[int] = ()) -> Iterator[tuple[Tensor, Tensor]]:
        """Stand-ins with the sums that they take over: roots of the node's backward.

        Autograd then adds each contribution of the node to the sum, one by one, as it does in the plain model; those to
        parameters with an id in ``later`` come later.
        """
        for use in self._uses:
            entry = use.entry
            if use.planned not in later and entry.is_next(use.number) and entry.total is not None:
                use.is_seeded = True
                yield use.stand_in, entry.total

    def collect(self, later: Collection[int] = ()) -> None:
        """Hand the node's contributions on, after its backward; those to parameters with an id in ``later`` are
        kept."""
        uses, self._uses = self._uses, []
        for use in uses:
            if use.planned in later:
                self._uses.append(use)
            else:
                self._gradients.add(use)


@final
@dataclass
class SharedGradients:
    """The sums of one chunk and microbatch.

    Attributes:
        sums: those that are not complete, by the parameter's id.
        finish: called with each parameter and its complete sum.
    """

    sums: dict[int, _Sum] = field(default_factory=dict)
    finish: Callable[[Tensor, Tensor], None] = deliver

    @contextmanager
    def standing_in(self, sites: tuple[Site, ...]) -> Iterator[StandIns]:
        """Hold stand-ins at ``sites`` for the forward of one node."""
        uses: dict[int, _Use] = {}
        swaps: list[tuple[Module, str, Parameter]] = []
        for site in sites:
            parameter = site.current
            if parameter is None or not parameter.requires_grad:
                continue  # frozen since the plan was built
            use = uses.get(id(parameter))
            if use is None:
                entry = self.sums.setdefault(id(parameter), _Sum(parameter))
                stand_in = keeping_parts(stand_in_for(parameter))
                use = uses[id(parameter)] = _Use(entry, entry.uses, id(site.parameter), stand_in)
                entry.uses += 1
            swaps.append((site.module, site.name, use.stand_in))
        with replaced(swaps):
            yield StandIns(self, list(uses.values()))

    def add(self, use: _Use) -> None:
        """Add one node's contributions; the last one finishes the sum."""
        entry = use.entry
        entry.add(use)
        if entry.summed == entry.uses:
            self.sums.pop(id(entry.parameter), None)
            if entry.total is not None:
                self.finish(entry.parameter, entry.total)


def shared_gradients_of(chunk_state: Any) -> SharedGradients:
    """The sums that ``chunk_state`` carries, made on first use."""
    return carried(chunk_state, _ATTRIBUTE, SharedGradients)
