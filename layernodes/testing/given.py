"""What ``check_node`` is given, refused in words where it is something else."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Final

from torch import Tensor
from torch.nn import Module

from layernodes.errors import ArgumentError, OptionError
from layernodes.plan.arguments import check_argument
from layernodes.plan.slot_nodes import factory_fault

_BATCH: Final = "give a tensor, or (tensor, dict) with attributes for the chunk state"
_PLAIN: Final = "give the function that is called with the layer and its input, such as MyLayer.forward"


def check_given(
    node: object, layer: object, batches: object, nodes: object, plain: object, examples: object, seed: object
) -> None:
    """Refuse arguments of another kind.

    Raises:
        ArgumentError: names the argument, what was found and what is wanted.
        OptionError: no layer.
    """
    fault = factory_fault(node)
    if fault is not None:
        raise ArgumentError(f"node is {fault}")
    if isinstance(layer, Sequence) and not isinstance(layer, str):
        for number, one in enumerate(layer):
            check_argument(f"layer[{number}]", one, Module)
        if not layer:
            raise OptionError("layer is an empty list; give at least one")
    else:
        check_argument("layer", layer, Module)
    _check_batches(batches)
    if nodes is not None:
        check_argument("nodes", nodes, Mapping)
    _check_plain(plain)
    check_argument("examples", examples, int)
    check_argument("seed", seed, int)


def _check_batches(batches: object) -> None:
    if isinstance(batches, Tensor):
        raise ArgumentError(
            f"batches is one tensor {list(batches.shape)}; give a list of 2 to 4 tensors, one a microbatch"
        )
    check_argument("batches", batches, Sequence)
    assert isinstance(batches, Sequence)
    for number, batch in enumerate(batches):
        match batch:
            case Tensor() | (Tensor(), Mapping()):
                continue
            case tuple():
                found = f"({', '.join(type(value).__name__ for value in batch)})"
            case _:
                found = f"of type {type(batch).__name__}"
        raise ArgumentError(f"batches[{number}] is {found}; {_BATCH}")


def _check_plain(plain: object) -> None:
    if plain is None:
        return
    if isinstance(plain, Module):
        raise ArgumentError(f"plain is a {type(plain).__name__}, a module; {_PLAIN}")
    if not callable(plain):
        raise ArgumentError(f"plain is {plain!r}; {_PLAIN}")
    try:
        signature = inspect.signature(plain)
    except ValueError:  # some functions written in C have none
        return
    try:
        signature.bind(None, None)
    except TypeError:
        names = f"({', '.join(signature.parameters)})"
        raise ArgumentError(
            f"plain takes {names}; it is called with the layer and its input: give MyLayer.forward, or a function of "
            f"two arguments"
        ) from None
