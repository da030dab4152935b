"""Functions around a layer's pass, for parameters that come and go: FSDP-style gather and release, offloading."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import final

from torch.nn import Module

from layernodes.plan.arguments import check_argument
from layernodes.slots import Phase

LayerHook = Callable[[Module], object]


@final
@dataclass(frozen=True, kw_only=True)
class LayerHooks:
    """Functions of the layer, called around its pass, once for each microbatch and direction, on the step's stream.

    Attributes:
        before_forward: before the first forward step of the layer.
        after_forward: after its last forward step.
        before_backward: before its first backward step.
        after_backward: after its last one, deferred weight gradients included.

    A schedule may have a layer's forward for one microbatch and its backward for another in progress at once; what
    one of them still uses, the hooks of the other must not release.
    """

    before_forward: LayerHook | None = None
    after_forward: LayerHook | None = None
    before_backward: LayerHook | None = None
    after_backward: LayerHook | None = None

    def before(self, phase: Phase) -> LayerHook | None:
        """What to call before the layer's first step of the pass that ``phase`` belongs to."""
        return self.before_forward if phase is Phase.F else self.before_backward

    def after(self, phase: Phase) -> LayerHook | None:
        """What to call after the layer's last step of the pass that ``phase`` belongs to."""
        return self.after_forward if phase is Phase.F else self.after_backward


def hooks_of(given: LayerHooks | None) -> LayerHooks | None:
    """The hooks that were given; raises ArgumentError where they are none."""
    check_argument("layer_hooks", given, LayerHooks, type(None))
    return given
