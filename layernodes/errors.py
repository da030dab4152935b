"""Every error that a user of layernodes can cause.

Each is a ``LayerNodesError`` and the built-in it belongs to, carries its facts as attributes, and says what was
found, what was wanted and what to change.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


class LayerNodesError(Exception):
    """Base of all errors raised by layernodes."""


class NodeDefinitionError(LayerNodesError, TypeError):
    """A node class is written wrongly; raised when the class is defined."""


class UnsupportedLayerError(LayerNodesError, TypeError):
    """A layer or a configuration that is not handled; raised before anything runs.

    Attributes:
        field: name of the offending field (a configuration field, or ``"layer"`` for the layer's class).
        value: what was found there.
    """

    def __init__(self, message: str, *, field: str, value: object) -> None:
        super().__init__(message)
        self.field = field
        self.value = value


class PlanError(LayerNodesError, ValueError):
    """A layer or chunk plan does not fit together: missing slot, wrong slot, unwritten read."""


@dataclass(frozen=True, kw_only=True)
class Violation:
    """One broken rule of a schedule.

    Attributes:
        rule: short name of the rule, e.g. ``"order"`` or ``"duplicate"``.
        step: text of the step at fault, e.g. ``"F0.L0.mlp"``.
        position: index of that step in the schedule, or None for a step that is missing.
        other: text of the missing, misplaced or earlier step that it collides with, or None.
        message: one sentence saying what is wrong and what to change.
    """

    rule: str
    step: str
    position: int | None
    other: str | None
    message: str


class ScheduleError(LayerNodesError, ValueError):
    """A schedule breaks rules; ``violations`` holds all of them in order of position."""

    def __init__(self, message: str, violations: Sequence[Violation] = ()) -> None:
        super().__init__(message)
        self.violations: tuple[Violation, ...] = tuple(violations)


class ScheduleParseError(ScheduleError):
    """Text or JSON that is no schedule; ``line`` and ``column`` (from 1) point at the first bad place."""

    def __init__(
        self, message: str, *, line: int, column: int, expected: str, violations: Sequence[Violation] = ()
    ) -> None:
        super().__init__(message, violations)
        self.line = line
        self.column = column
        self.expected = expected


class NodeStateError(LayerNodesError, RuntimeError):
    """A node or a run is used out of its life cycle: backward before forward, second use, unread handoff."""


class StepError(LayerNodesError, RuntimeError):
    """Wraps whatever a step raised.

    Attributes:
        step: text of the step that raised; its error is ``__cause__``.
        layer: index of its layer, or None for a chunk end.
        microbatch: index of its microbatch.
        completed: texts of the steps that had completed by then, in order of completion.
    """

    def __init__(
        self, message: str, *, step: str, layer: int | None, microbatch: int, completed: Sequence[str]
    ) -> None:
        super().__init__(message)
        self.step = step
        self.layer = layer
        self.microbatch = microbatch
        self.completed: tuple[str, ...] = tuple(completed)


class RankMismatchError(LayerNodesError, RuntimeError):
    """The ranks of a process group hold different schedules."""
