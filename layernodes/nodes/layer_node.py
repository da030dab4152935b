"""What the five nodes over a Megatron-Core layer share."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.nn import Module, Parameter

from layernodes._megatron.freeing import reasons_to_copy
from layernodes._megatron.layer import LayerParts
from layernodes._megatron.slot_parts import slot_modules, slot_touches_rng
from layernodes._megatron.support import check_layer
from layernodes._megatron.wgrad import ModulesHook, deferrable_modules, own_deferred_parameters
from layernodes.nodes.base import ScheduleNode
from layernodes.slots import Slot

if TYPE_CHECKING:
    from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionLayer
    from megatron.core.transformer.transformer_layer import TransformerLayer


class LayerNode(ScheduleNode):
    """A node over a ``TransformerLayer``, or over a ``MultiTokenPredictionLayer`` whose inner layer is one.

    Args:
        layer: the layer to run; it is not changed.

    Raises:
        UnsupportedLayerError: a layer class or configuration that is not handled.
    """

    def __init__(self, layer: TransformerLayer | MultiTokenPredictionLayer) -> None:
        check_layer(layer)
        self._parts = LayerParts(layer)

    def modules(self) -> tuple[Module, ...]:
        return (*slot_modules(self._parts, Slot(str(self.slot))), *self._own_modules())

    def _own_modules(self) -> tuple[Module, ...]:
        """Modules that a subclass holds, beside the layer's."""
        of_layer = set((self._parts.mtp or self._parts.layer).modules())
        return tuple(module for module in super().modules() if module not in of_layer)

    def deferred_parameters(self) -> tuple[Parameter, ...]:
        return deferrable_modules(self._parts, self.modules())

    def own_deferred_parameters(self) -> tuple[Parameter, ...]:
        hook = self.wgrad_hook()
        if hook is not None and not isinstance(hook, ModulesHook):
            return tuple(hook.parameters())  # a user's
        return own_deferred_parameters(self._parts.config, self.modules())

    def touches_rng(self) -> bool:
        return slot_touches_rng(self._parts, Slot(str(self.slot)))

    def copies(self) -> tuple[str, ...]:
        return reasons_to_copy(self._parts, Slot(str(self.slot)), self.keeps_input())
