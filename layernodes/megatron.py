"""The drop-in: Megatron-Core's four builder functions over our nodes, and ``install()``, which puts them in their
place."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self, final

from layernodes._megatron.layer_kinds import kind_of, moe_metadata
from layernodes._megatron.patches import Builders, Patch, is_patched, schedule_plan_patches
from layernodes._megatron.wgrad import delays_wgrads
from layernodes.errors import NodeStateError, UnsupportedLayerError
from layernodes.plan.arguments import check_argument
from layernodes.plan.describe import wgrad_names
from layernodes.plan.forward_funcs import ForwardFuncs
from layernodes.plan.layer_plan import LayerPlan, WgradMode
from layernodes.training import schedule
from layernodes.wgrad import StoreHook

if TYPE_CHECKING:
    from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionLayer
    from megatron.core.transformer.transformer_layer import TransformerLayer
    from torch.nn import Module

_BUILD: Final = "write install(lambda layer: LayerPlan.build(layer, nodes={Slot.MLP: MyNode}))"


def build_transformer_layer_callables(layer: TransformerLayer) -> tuple[ForwardFuncs, dict[str, Any]]:
    """The five callables and the weight-gradient hooks of a ``TransformerLayer``.

    Same name, parameter and result as in ``megatron.core.models.gpt.fine_grained_callables``.

    Raises:
        UnsupportedLayerError: a layer or configuration that is not handled.
    """
    _require(layer, is_mtp=False)
    return _plan_for_caller(layer).callables()


def build_mtp_layer_callables(layer: MultiTokenPredictionLayer) -> tuple[ForwardFuncs, dict[str, Any]]:
    """The five callables and the weight-gradient hooks of a ``MultiTokenPredictionLayer``.

    Same name, parameter and result as in ``megatron.core.models.common.fine_grained_callables``; the inner layer may be
    dense.

    Raises:
        UnsupportedLayerError: a layer or configuration that is not handled.
    """
    _require(layer, is_mtp=True)
    return _plan_for_caller(layer).callables()


def build_layer_callables(layer: Module) -> tuple[ForwardFuncs, dict[str, Any]]:
    """The five callables and the weight-gradient hooks of either kind of layer, fresh for one microbatch.

    Same name, parameter and result as in ``megatron.core.models.common.fine_grained_callables``.

    Raises:
        UnsupportedLayerError: a layer or configuration that is not handled.
    """
    return _plan_for_caller(layer).callables()


def get_layer_moe_metadata(layer: Module) -> tuple[bool, int | None]:
    """``(is_moe, num_local_experts)`` of a ``layer``; the second is None for a dense one.

    Same name, parameter and result as in ``megatron.core.models.common.fine_grained_callables``.
    """
    return moe_metadata(layer)


class _Installed(NamedTuple):
    """What an installation answers Megatron-Core of one layer, the same for every microbatch."""

    plan: LayerPlan
    forward_funcs: ForwardFuncs
    metadata: tuple[bool, int | None]


@final
class Installation:
    """Puts our nodes under Megatron-Core's own schedule plan while active; ``install()`` makes one.

    A layer's plan is built once and reused by every microbatch of the installation.

    Args:
        build: makes the plan of a layer.
    """

    def __init__(self, build: Callable[[Module], LayerPlan] = LayerPlan.build) -> None:
        self._build_plan = build
        self._plans: dict[tuple[Module, bool], _Installed] = {}
        self._saved: list[Patch] = []
        self._pending: dict[int, StoreHook] = {}

    @property
    def active(self) -> bool:
        """Whether it is in place now."""
        return bool(self._saved)

    def start(self) -> Self:
        """Put our nodes in place.

        Raises:
            NodeStateError: an installation is in place already.
        """
        if is_patched():
            raise NodeStateError(
                "layernodes is installed in Megatron-Core already; leave the other install() first, one serves "
                "all models"
            )
        builders = Builders(
            build_transformer_layer_callables=self._build,
            build_mtp_layer_callables=self._build,
            build_layer_callables=self._build,
            get_layer_moe_metadata=lambda layer: self._installed(layer).metadata,
        )
        patches = schedule_plan_patches(builders)
        self._saved = [Patch(owner, name, owner.__dict__[name]) for owner, name, _ in patches]
        for owner, name, value in patches:
            setattr(owner, name, value)
        return self

    def stop(self) -> None:
        """Give Megatron-Core its own names back; does nothing where not started.

        Raises:
            NodeStateError: weight gradients that a backward deferred were never computed; lists them. Done all the
                same.
        """
        pending = self._restore()
        if pending:
            raise NodeStateError(
                f"weight gradients were deferred and backward_dw() was never called for them: {'; '.join(pending)}; "
                f"with delay_wgrad_compute on, call backward_dw() of each slot after its backward"
            )

    def _restore(self) -> list[str]:
        while self._saved:
            owner, name, value = self._saved.pop()
            setattr(owner, name, value)
        pending = [
            f"layer {getattr(plan.layer, 'layer_number', '?')} {slot} ({', '.join(wgrad_names(plan.layer, node))})"
            for hook in self._pending.values()
            for plan in (installed.plan for installed in self._plans.values())
            for slot, node in plan.nodes.items()
            if node is hook.node
        ]
        self._pending.clear()
        self._plans.clear()
        return pending

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if exc is None:
            self.stop()
        else:
            self._restore()

    def _build(self, layer: Module) -> tuple[ForwardFuncs, dict[str, Any]]:
        installed = self._installed(layer)
        backward_dw = installed.plan.backward_dw
        for hooks in backward_dw.values():
            for hook in hooks if isinstance(hooks, list) else [hooks]:
                if isinstance(hook, StoreHook):
                    hook.watch(self._pending)
        return installed.forward_funcs, backward_dw

    def _installed(self, layer: Module) -> _Installed:
        key = layer, delays_wgrads(layer)
        installed = self._plans.get(key)
        if installed is None:
            plan = self._build_plan(layer)
            check_argument("what build returned", plan, LayerPlan, advice=_BUILD)
            installed = self._plans[key] = _Installed(plan, plan.forward_funcs, moe_metadata(layer))
        return installed


def install(build: Callable[[Module], LayerPlan] | None = None) -> Installation:
    """Run Megatron-Core's own schedule plan on our nodes.

    ``GPTModel.build_schedule_plan``, ``TransformerLayerSchedulePlan.run``, ``TransformerModelChunkSchedulePlan.run``
    and the combined-1F1B training functions then use them. Use it as a context manager, or with ``start()`` and
    ``stop()``; leaving it restores everything.

    Args:
        build: makes the plan of a layer, once a layer; give one that calls ``LayerPlan.build(layer, nodes=...)`` to
            run nodes of your own.

    Example::

        with layernodes.install():
            plan = model.build_schedule_plan(tokens, positions, mask, labels=labels)
            loss = type(plan).run(plan, None)
    """
    # isinstance() takes Callable, an abstract base class; mypy holds its name for a special form, which is no class.
    check_argument("build", build, Callable, type(None), advice=_BUILD)  # type: ignore[arg-type]  # see above
    return Installation(build or _plan_for_caller)


def _plan_for_caller(layer: Module) -> LayerPlan:
    """A plan that defers weight gradients where the layer's configuration says that its caller drains them."""
    kind_of(layer, has_nodes=False)
    return LayerPlan.build(layer, wgrad=WgradMode.AUTO if delays_wgrads(layer) else WgradMode.OFF)


def _require(layer: Any, *, is_mtp: bool) -> None:
    if kind_of(layer, has_nodes=False).is_mtp is not is_mtp:
        wanted = "MultiTokenPredictionLayer" if is_mtp else "TransformerLayer"
        raise UnsupportedLayerError(
            f"expected a {wanted}, found {type(layer).__name__}; build_layer_callables takes both",
            field="layer",
            value=type(layer),
        )


__all__ = [
    "Installation",
    "build_layer_callables",
    "build_mtp_layer_callables",
    "build_transformer_layer_callables",
    "get_layer_moe_metadata",
    "install",
    "schedule",
]
