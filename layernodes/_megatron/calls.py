"""Module calls that span several slots.

The plain model calls the decoder, each layer, each MoE layer and the MTP block and layers as modules, so hooks
registered on them fire. Split into slots, none of them is called: the call begins in one slot and ends in another.
``ModuleCall`` does what ``torch.nn.Module.__call__`` does around ``forward``, in two halves.
"""

from __future__ import annotations

from typing import Any, final

from torch.nn.modules import module as nn_module
from torch.utils.hooks import BackwardHook


def has_hooks(module: Any) -> bool:
    """Whether calling ``module`` would run a hook, its own or a global one."""
    return bool(
        module._forward_pre_hooks
        or module._forward_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or nn_module._global_forward_pre_hooks
        or nn_module._global_forward_hooks
        or nn_module._global_backward_hooks
        or nn_module._global_backward_pre_hooks
    )


@final
class ModuleCall:
    """One call of ``module`` with keyword arguments, from its pre-hooks (``begin``) to its forward hooks (``end``)."""

    __slots__ = ("_args", "_backward", "_kwargs", "_module")

    def __init__(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._module = module
        self._backward: Any = None  # a BackwardHook
        for hook_id, hook in (*nn_module._global_forward_pre_hooks.items(), *module._forward_pre_hooks.items()):
            if hook_id in module._forward_pre_hooks_with_kwargs:
                result = hook(module, args, kwargs)
                if result is not None:
                    args, kwargs = result
            else:
                result = hook(module, args)
                if result is not None:
                    args = result if isinstance(result, tuple) else (result,)
        hooks, _ = module._get_backward_hooks()
        pre_hooks = module._get_backward_pre_hooks() if _has_backward_pre_hooks(module) else []
        if hooks or pre_hooks:
            self._backward = BackwardHook(module, hooks, pre_hooks)
            args = self._backward.setup_input_hook(args)
        self._args = args
        self._kwargs = kwargs

    @staticmethod
    def begin(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[ModuleCall | None, dict[str, Any]]:
        """Begin a call; None where nothing listens. The keyword arguments returned are those that the hooks left."""
        if not has_hooks(module):
            return None, kwargs
        call = ModuleCall(module, args, kwargs)
        return call, call._kwargs

    @property
    def args(self) -> tuple[Any, ...]:
        """The positional arguments that the hooks left."""
        return self._args

    def end(self, output: Any) -> Any:
        """Run the forward hooks on ``output`` and return what they made of it."""
        module = self._module
        for hook_id, hook in (*nn_module._global_forward_hooks.items(), *module._forward_hooks.items()):
            if hook_id in module._forward_hooks_with_kwargs or hook_id in nn_module._global_forward_hooks_with_kwargs:
                result = hook(module, self._args, self._kwargs, output)
            else:
                result = hook(module, self._args, output)
            if result is not None:
                output = result
        if self._backward is not None:
            output = self._backward.setup_output_hook(output)
        return output


def _has_backward_pre_hooks(module: Any) -> bool:
    return bool(module._backward_pre_hooks or nn_module._global_backward_pre_hooks)
