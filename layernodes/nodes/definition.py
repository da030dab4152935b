"""What is checked of a node class when it is defined."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, cast

from layernodes.errors import NodeDefinitionError
from layernodes.slots import ExtraSlot, Slot, StreamType

if TYPE_CHECKING:
    from layernodes.nodes.base import ScheduleNode


def check_definition(cls: type[ScheduleNode], verbs: Sequence[str]) -> None:
    """Raise NodeDefinitionError for a missing or wrong declaration, or an override of one of the final ``verbs``."""
    name = f"{cls.__name__}({', '.join(base.__name__ for base in cls.__bases__)})"
    for verb in verbs:
        if verb in cls.__dict__:
            raise NodeDefinitionError(
                f"{name} overrides {verb!r}, which is final; override 'forward', or wrap the node to run code around it"
            )
    if _is_abstract(cls):
        return
    slot = cls.__dict__.get("slot", getattr(cls, "slot", None))
    if not isinstance(slot, Slot | ExtraSlot):
        found = "declares no 'slot'" if slot is None else f"declares slot = {slot!r}"
        raise NodeDefinitionError(f"{name} {found}; declare one of {', '.join(f'Slot.{s.name}' for s in Slot)}")
    stream = getattr(cls, "stream", None)
    if not isinstance(stream, StreamType):
        found = "declares no 'stream'" if stream is None else f"declares stream = {stream!r}"
        raise NodeDefinitionError(f"{name} {found}; declare StreamType.COMPUTE or StreamType.COMM")
    for attribute in ("reads", "writes"):
        _check_handoff_map(name, attribute, getattr(cls, attribute))
    both = set(cls.reads) & set(cls.writes)
    if both:
        raise NodeDefinitionError(
            f"{name} declares {', '.join(sorted(both))} in both 'reads' and 'writes'; a handoff is written once: "
            f"write it on under a new name"
        )
    _check_forward(name, cls)


def _check_handoff_map(name: str, attribute: str, declared: object) -> None:
    if not isinstance(declared, Mapping):
        raise NodeDefinitionError(
            f"{name} declares {attribute} = {declared!r}; declare a mapping from handoff name to type, "
            f"e.g. {attribute} = {{'gate_scores': Tensor}}"
        )
    for key, kind in declared.items():
        try:
            isinstance(None, kind)
        except TypeError:
            valid = False
        else:
            valid = isinstance(key, str)
        if not valid:
            raise NodeDefinitionError(
                f"{name} declares {attribute} {key!r}: {kind!r}; declare a name and a type, e.g. 'gate_scores': Tensor"
            )


def _check_forward(name: str, cls: type[ScheduleNode]) -> None:
    kinds = [p.kind for p in inspect.signature(cls.forward).parameters.values()]
    positional = [k for k in kinds if k in (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)]
    if len(positional) < 2 and inspect.Parameter.VAR_POSITIONAL not in kinds:
        raise NodeDefinitionError(
            f"{name}.forward takes {inspect.signature(cls.forward)}; declare forward(self, ctx, *inputs)"
        )


def _is_abstract(cls: type) -> bool:
    return any(
        getattr(cast(object, getattr(cls, attribute, None)), "__isabstractmethod__", False) for attribute in dir(cls)
    )
