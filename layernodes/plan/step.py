"""One phase of one slot of one layer of one microbatch, and its text."""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import dataclass
from operator import index
from typing import Final, Self, SupportsIndex, final

from layernodes.errors import ParsePlace, ScheduleError, ScheduleParseError
from layernodes.plan.arguments import check_argument
from layernodes.slots import Phase, is_slot_name

# At most nine digits: far beyond any real count, and far below what int() refuses to convert.
_NUMBER = r"(?:0|[1-9][0-9]{0,8})"
_NAME = r"[A-Za-z_][A-Za-z0-9_]*"
_STEP = re.compile(rf"([FBW])({_NUMBER})\.(?:L({_NUMBER})\.)?(?!L[0-9]+(?:\.|\Z))({_NAME})")
_NUMBER_RE = re.compile(_NUMBER)
_NAME_RE = re.compile(_NAME)
_LAYER_LIKE = re.compile(r"L[0-9]+(?![A-Za-z0-9_])")
_LIMIT = 10**9
_PHASES: Final = {phase.value: phase for phase in Phase}


@final
@dataclass(frozen=True, slots=True)
class Step:
    """One phase of one slot of one layer of one microbatch; text ``F0.L3.moe_dispatch`` or ``B1.post_process``.

    Attributes:
        phase: what is done: forward, backward or deferred weight gradients.
        microbatch: number of the microbatch, from 0.
        layer: number of the layer, from 0 through decoder and then MTP layers; None for the chunk's ends.
        slot: name of the slot. Any identifier: whether the layer has it is for ``validate`` to say.

    Raises:
        ScheduleError: a number is negative or beyond nine digits, or the slot is no identifier.
    """

    phase: Phase
    microbatch: int
    layer: int | None
    slot: str

    def __post_init__(self) -> None:
        if type(self.slot) is not str:
            object.__setattr__(self, "slot", str(self.slot))
        if type(self.phase) is not Phase:
            if not isinstance(self.phase, str) or self.phase not in _PHASES:
                raise ScheduleError(f"unknown phase {self.phase!r}; expected one of {', '.join(_PHASES)}")
            object.__setattr__(self, "phase", _PHASES[self.phase])
        for name, number in (("microbatch", self.microbatch), ("layer", 0 if self.layer is None else self.layer)):
            if type(number) is not int and isinstance(number, SupportsIndex):  # True, or a number of numpy's
                with suppress(TypeError, ValueError):  # tensors of several elements have __index__ too
                    object.__setattr__(self, name, number := index(number))
            if type(number) is not int or not 0 <= number < _LIMIT:
                raise ScheduleError(
                    f"{number!r} in {self!r} is no microbatch or layer number; expected 0 to {_LIMIT - 1}"
                )
        if not is_slot_name(self.slot):
            raise ScheduleError(f"{self.slot!r} is no slot name; expected an identifier other than L and digits")

    def __str__(self) -> str:
        """The step's text, which ``parse`` reads back."""
        if self.layer is None:
            return f"{self.phase}{self.microbatch}.{self.slot}"
        return f"{self.phase}{self.microbatch}.L{self.layer}.{self.slot}"

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read one step from its exact text, without blanks around it.

        Raises:
            ScheduleParseError: the text is not a step; ``column`` points at the first character that does not fit.
        """
        check_argument("text", text, str, advice="give a step's text, such as 'F0.L3.mlp'")
        step = cls.match(text)
        if step is None:
            column, expected = explain_step(text)
            place = ParsePlace(line=1, column=column + 1, found=text, expected=expected)
            raise ScheduleParseError.at([place])
        return step

    @classmethod
    def match(cls, text: str) -> Self | None:
        """Read one step from its exact text; None where the text is not a step."""
        try:
            found = _STEP.fullmatch(text)
        except TypeError:
            check_argument("text", text, str, advice="give a step's text, such as 'F0.L3.mlp'")
            raise
        if found is None:
            return None
        phase, microbatch, layer, slot = found.groups()
        return cls(_PHASES[phase], int(microbatch), None if layer is None else int(layer), slot)


def explain_step(text: str) -> tuple[int, str]:
    """Where a text stops being a step: offset of the first misfit, from 0, and what was expected there."""
    if text[:1] not in _PHASES:
        return 0, "a phase: F, B or W"
    number = _NUMBER_RE.match(text, 1)
    if number is None:
        return 1, "the number of a microbatch"
    at = number.end()
    if text[at : at + 1] != ".":
        return at, "'.' after the number of the microbatch (at most 9 digits, no leading zeros)"
    at += 1
    if _LAYER_LIKE.match(text, at):
        layer = _NUMBER_RE.match(text, at + 1)
        at = at + 1 if layer is None else layer.end()
        if text[at : at + 1] != ".":
            return at, "'.' and a slot after the number of the layer (at most 9 digits, no leading zeros)"
        at += 1
    name = _NAME_RE.match(text, at)
    if text.count(".") > 1 and text[1:at].count(".") == 1:  # something stands where the layer should
        return at, "a layer as L and its number, such as L0"
    if name is None or _LAYER_LIKE.match(text, at):
        return at, "the name of a slot"
    return name.end(), "the end of the step"
