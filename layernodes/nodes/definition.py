"""What is checked of a node class when it is defined, and when a node is made of it."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from types import FunctionType
from typing import TYPE_CHECKING, Final, cast

from layernodes.errors import NodeDefinitionError
from layernodes.slots import ExtraSlot, Slot, StreamType

if TYPE_CHECKING:
    from layernodes.nodes.base import ScheduleNode

_POSITIONAL: Final = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_FORWARD: Final = "declare forward(self, ctx, *inputs): the microbatch's context, then what the slot before returned"


def check_definition(cls: type[ScheduleNode], verbs: Sequence[str]) -> None:
    """Raise NodeDefinitionError for a missing or wrong declaration, or an override of one of the final ``verbs``."""
    name = _title(cls)
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


def check_complete(cls: type[ScheduleNode]) -> None:
    """Raise NodeDefinitionError where a node is made of a class whose methods are not all written."""
    missing = sorted(getattr(cls, "__abstractmethods__", ()))
    if not missing:
        return
    name = missing[0]
    how = (
        "write def forward(self, ctx, *inputs), which returns a tensor or a tuple of tensors"
        if name == "forward"
        else "write it in a subclass, and make the node of that"
    )
    raise NodeDefinitionError(f"{_title(cls)} has no {', no '.join(map(repr, missing))}; {how}")


def _check_forward(name: str, cls: type[ScheduleNode]) -> None:
    if not callable(cls.forward):
        raise NodeDefinitionError(f"{name}.forward is {cls.forward!r}; {_FORWARD}")
    declared = inspect.getattr_static(cls, "forward")
    if not isinstance(declared, FunctionType | staticmethod | classmethod):
        return  # a descriptor of another kind, which alone knows what it takes
    parameters = [p.replace(annotation=p.empty) for p in inspect.signature(cls.forward).parameters.values()]
    signature = inspect.Signature(parameters)
    if isinstance(declared, FunctionType) and parameters and parameters[0].kind in _POSITIONAL:
        del parameters[0]  # self
    kinds = [parameter.kind for parameter in parameters]
    if sum(kind in _POSITIONAL for kind in kinds) < 2 and inspect.Parameter.VAR_POSITIONAL not in kinds:
        raise NodeDefinitionError(f"{name}.forward takes {signature}; {_FORWARD}")
    wanting = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY and p.default is p.empty]
    if wanting:
        raise NodeDefinitionError(
            f"{name}.forward takes {signature}; it is called with the context and the inputs alone: give "
            f"{', '.join(map(repr, wanting))} a default, or take it in __init__"
        )


def _title(cls: type) -> str:
    return f"{cls.__name__}({', '.join(base.__name__ for base in cls.__bases__)})"


def _is_abstract(cls: type) -> bool:
    return any(
        getattr(cast(object, getattr(cls, attribute, None)), "__isabstractmethod__", False) for attribute in dir(cls)
    )
