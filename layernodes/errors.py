"""Every error that a user of layernodes can cause.

Each is a ``LayerNodesError`` and the built-in it belongs to, carries its facts as attributes, and says what was
found, what was wanted and what to change.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


class LayerNodesError(Exception):
    """Base of all errors raised by layernodes; each is pickled with its facts, as out of a worker process."""

    def __reduce__(self) -> tuple[object, ...]:
        return _remade, (type(self), self.args, self.__dict__)


def _remade(kind: type[LayerNodesError], arguments: tuple[object, ...], facts: dict[str, object]) -> LayerNodesError:
    """An error out of a pickle: its constructor wants facts by name, which an exception's own way does not give it."""
    error = kind.__new__(kind, *arguments)
    error.__dict__.update(facts)
    return error


class NodeDefinitionError(LayerNodesError, TypeError):
    """A node class is written wrongly; raised when it is defined, or, unfinished, when a node is made of it."""


@dataclass(frozen=True, kw_only=True)
class ConfigViolation:
    """One reason why a configuration is not handled.

    Attributes:
        field: name of the configuration field, or of what else is at fault (``"models"``, ``"layer"``).
        value: what was found there.
        reason: what is wrong with it and what to change.
    """

    field: str
    value: object
    reason: str


class UnsupportedLayerError(LayerNodesError, TypeError):
    """A layer or a configuration that is not handled; raised before anything runs.

    Attributes:
        field: name of the offending field (a configuration field, or ``"layer"`` for the layer's class).
        value: what was found there.
        violations: every reason, where a whole configuration was checked; the first one is ``field`` and ``value``.
    """

    def __init__(self, message: str, *, field: str, value: object, violations: Sequence[ConfigViolation] = ()) -> None:
        super().__init__(message)
        self.field = field
        self.value = value
        self.violations = tuple(violations) or (ConfigViolation(field=field, value=value, reason=message),)


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


class BatchError(LayerNodesError, TypeError):
    """A batch is not what its chunk takes."""


class ArgumentError(LayerNodesError, TypeError):
    """An argument is of another type than wanted; the message says where to get one."""


class OptionError(LayerNodesError, ValueError):
    """An option has a value that does not exist; the message lists those that do."""


class ScheduleError(LayerNodesError, ValueError):
    """A schedule breaks rules; ``violations`` holds all of them in order of position."""

    def __init__(self, message: str, violations: Sequence[Violation] = ()) -> None:
        super().__init__(message)
        self.violations: tuple[Violation, ...] = tuple(violations)


@dataclass(frozen=True, kw_only=True)
class ParsePlace:
    """One place in a text that is no schedule.

    Attributes:
        line: line of the place, from 1.
        column: column of the first character that does not fit, from 1.
        found: the word or value that stands there.
        expected: what should stand there instead.
    """

    line: int
    column: int
    found: str
    expected: str

    def __str__(self) -> str:
        found = self.found if len(self.found) <= 60 else self.found[:57] + "..."
        return f"line {self.line}, column {self.column}: found {found!r}, expected {self.expected}"


class ScheduleParseError(ScheduleError):
    """Text or JSON that is no schedule.

    Attributes:
        line: line of the first bad place, from 1.
        column: its column, from 1.
        expected: what was expected there.
        places: every bad place, in reading order.
        violations: the same places as violations of the rule ``"syntax"``.
    """

    def __init__(
        self,
        message: str,
        *,
        line: int,
        column: int,
        expected: str,
        violations: Sequence[Violation] = (),
        places: Sequence[ParsePlace] = (),
    ) -> None:
        super().__init__(message, violations)
        self.line = line
        self.column = column
        self.expected = expected
        self.places: tuple[ParsePlace, ...] = tuple(places)

    @classmethod
    def at(cls, places: Sequence[ParsePlace], *, source: str = "schedule") -> ScheduleParseError:
        """The error for one or more bad ``places`` of ``source``; its text lists them, the first 20 of very many."""
        shown = [str(place) for place in places[:20]]
        if len(places) > len(shown):
            shown.append(f"and {len(places) - len(shown)} more")
        return cls(
            f"{source} cannot be read: " + (shown[0] if len(shown) == 1 else "\n  " + "\n  ".join(shown)),
            line=places[0].line,
            column=places[0].column,
            expected=places[0].expected,
            violations=[
                Violation(rule="syntax", step=place.found, position=None, other=None, message=str(place))
                for place in places
            ],
            places=places,
        )


class CostError(LayerNodesError, ValueError):
    """A cost model lacks a cost, holds an impossible one, or cannot be read.

    Attributes:
        faults: of a model that does not fit, each fault: its place, what was found and what was wanted.
    """

    def __init__(self, message: str, *, faults: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.faults: tuple[str, ...] = tuple(faults)


class MissingExtraError(LayerNodesError, ImportError):
    """An optional dependency is not installed.

    Attributes:
        extra: the extra of layernodes that installs it.
    """

    def __init__(self, message: str, *, extra: str) -> None:
        super().__init__(message)
        self.extra = extra


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


class StreamOrderError(LayerNodesError, RuntimeError):
    """Work on the two streams is not ordered, or a storage is used out of its life.

    Attributes:
        rule: ``"order"``, ``"released"``, ``"reuse"``, ``"undeclared"`` or ``"collectives"``.
        step: text of the step at fault.
        other: text of the step that it collides with, or None where that is not known.
        tensor: the tensor, or the process group.
    """

    def __init__(self, message: str, *, rule: str, step: str, other: str | None, tensor: str) -> None:
        super().__init__(message)
        self.rule = rule
        self.step = step
        self.other = other
        self.tensor = tensor

    @classmethod
    def of_group(cls, group: str, *, step: str, other: str, stream: str) -> StreamOrderError:
        """A process group whose collectives come from both streams: ``step`` issues some, ``other`` on ``stream``."""
        return cls(
            f"{step} issues collectives of process group {group!r}, which {other} uses on the {stream} stream; issue "
            f"those of one group on one stream, or give the node a group of its own",
            rule="collectives",
            step=step,
            other=other,
            tensor=group,
        )


class RankMismatchError(LayerNodesError, RuntimeError):
    """The ranks of a process group hold different schedules."""
