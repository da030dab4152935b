"""Schedules as values: an ordered list of steps that prints, parses back, slices and adds."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import ClassVar, Self, final, overload

from layernodes.errors import ScheduleError, ScheduleParseError
from layernodes.plan import schedule_json
from layernodes.plan.arguments import check_argument, check_items
from layernodes.plan.file_kinds import SCHEDULE_ENDINGS
from layernodes.plan.grid import render, stream_in
from layernodes.plan.shape import ChunkShape
from layernodes.plan.step import Step
from layernodes.plan.text import decode, parse_steps, print_steps
from layernodes.slots import Phase


@dataclass(frozen=True, init=False)
class StepSequence:
    """What ``Schedule`` and ``PairSchedule`` have in common: steps in order, as a value.

    Attributes:
        steps: the steps in the order in which they are launched.
    """

    kind: ClassVar[schedule_json.Kind]
    steps: tuple[Step, ...]

    def __init__(self, steps: Iterable[Step] = ()) -> None:
        if not isinstance(steps, Iterable):
            check_items("steps", steps, Step, advice=f"give a list of Step, or use {type(self).__name__}.parse(text)")
        object.__setattr__(self, "steps", tuple(steps))
        wrong = next((step for step in self.steps if not isinstance(step, Step)), None)
        if wrong is not None:
            advice = (
                "unpack it: [*steps, ...]"
                if isinstance(wrong, Iterable) and not isinstance(wrong, str)
                else (f"use Step.parse(text), or {type(self).__name__}.parse(text)")
            )
            raise ScheduleError(f"{wrong!r} is no Step; {advice}")

    def __iter__(self) -> Iterator[Step]:
        return iter(self.steps)

    def __len__(self) -> int:
        return len(self.steps)

    @overload
    def __getitem__(self, index: int) -> Step: ...
    @overload
    def __getitem__(self, index: slice) -> Self: ...
    def __getitem__(self, index: int | slice) -> Step | Self:
        """A step, or for a slice a schedule of the same type."""
        return type(self)(self.steps[index]) if isinstance(index, slice) else self.steps[index]

    def __add__(self, other: Self) -> Self:
        """This schedule's steps, then those of another of the same type."""
        if type(other) is not type(self):
            return NotImplemented
        return type(self)(self.steps + other.steps)

    def __str__(self) -> str:
        """One step a line; ``parse`` reads it back."""
        return print_steps(self.steps)

    def __repr__(self) -> str:
        shown = " ".join(map(str, self.steps[:3])) + (" ..." if len(self.steps) > 3 else "")
        return f"<{type(self).__name__} of {len(self.steps)} steps: {shown}>"

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read the text form: steps separated by blanks or new lines, ``#`` starts a comment.

        Raises:
            ScheduleParseError: some words are no steps; lists every place with line and column.
        """
        return cls(parse_steps(text))

    def to_json(self) -> str:
        """JSON text, one step a line, that ``from_json`` reads back."""
        return schedule_json.dump(self.steps, kind=self.kind)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read JSON text.

        Raises:
            ScheduleParseError: no JSON, not a schedule of this type, or bad steps; every place with line and column.
        """
        check_argument("text", text, str)
        return cls(schedule_json.load(text, kind=cls.kind))

    @classmethod
    def load(cls, path: str | PathLike[str]) -> Self:
        """Read a ``.txt`` or ``.json`` file, in UTF-8.

        Raises:
            ScheduleParseError: the file holds no schedule; names the file and every bad place.
            ScheduleError: the name of the file ends in neither.
            OSError: the file cannot be read.
        """
        check_argument("path", path, str, PathLike)
        as_json = _is_json(Path(path))
        try:
            text = decode(Path(path).read_bytes())
            return cls.from_json(text) if as_json else cls.parse(text)
        except ScheduleParseError as error:
            raise ScheduleParseError.at(error.places, source=str(path)) from None

    def save(self, path: str | PathLike[str]) -> None:
        """Write a ``.txt`` or ``.json`` file, in UTF-8.

        Raises:
            ScheduleError: the name of the file ends in neither.
            OSError: the file cannot be written.
        """
        check_argument("path", path, str, PathLike)
        text = self.to_json() if _is_json(Path(path)) else f"{self}\n"
        Path(path).write_text(text, encoding="utf-8", newline="\n")

    def _marks(self, mark: int | Iterable[int] | None) -> dict[int, str]:
        if not isinstance(mark, Iterable):
            check_argument("mark", mark, int, type(None), advice="give the position of a step, or several in a list")
        marks = [] if mark is None else [mark] if isinstance(mark, int) else list(mark)
        check_items("mark", marks, int, advice="give the positions of steps, from 0")
        wrong = [position for position in marks if not 0 <= position < len(self)]
        if wrong:
            raise ScheduleError(f"cannot mark step {wrong[0]}: the schedule has steps 0 to {len(self) - 1}")
        return dict.fromkeys(marks, "")


@final
class Schedule(StepSequence):
    """The order in which the steps of one model chunk are launched, over any number of microbatches."""

    kind = schedule_json.Kind.SCHEDULE

    def shift(self, microbatches: int) -> Schedule:
        """The same steps for other microbatches: adds a number, possibly negative, to each microbatch.

        Raises:
            ScheduleError: a microbatch would be negative.
        """
        check_argument("microbatches", microbatches, int)
        return Schedule(Step(step.phase, step.microbatch + microbatches, step.layer, step.slot) for step in self.steps)

    def grid(
        self, shape: ChunkShape | None = None, *, mark: int | Iterable[int] | None = None, context: int = 3
    ) -> str:
        """Draw the schedule: one row a step, one column a stream.

        Args:
            shape: says which stream a slot is on; None takes Megatron-Core's streams, COMPUTE for other slots.
            mark: positions to mark with an arrow; then only the rows around them are drawn.
            context: rows drawn on each side of a mark.

        Raises:
            ScheduleError: a mark is no position of the schedule.
        """
        return render(self.steps, stream_of=stream_in(shape), marks=self._marks(mark), context=context)


@final
class PairSchedule(StepSequence):
    """The forward of one chunk against the backward of another (or of the same, from an earlier call).

    Its steps are ``F0.*`` of the forward chunk and ``B1.*`` and ``W1.*`` of the backward chunk.
    """

    kind = schedule_json.Kind.PAIR

    def grid(
        self,
        forward_shape: ChunkShape | None = None,
        backward_shape: ChunkShape | None = None,
        *,
        mark: int | Iterable[int] | None = None,
        context: int = 3,
    ) -> str:
        """Draw the schedule as ``Schedule.grid`` does.

        Args:
            forward_shape, backward_shape: say which stream a slot of each chunk is on; None as there.
            mark, context: as there.
        """
        forward, backward = stream_in(forward_shape), stream_in(backward_shape)
        return render(
            self.steps,
            stream_of=lambda step: (forward if step.phase is Phase.F else backward)(step),
            marks=self._marks(mark),
            context=context,
        )


def _is_json(path: Path) -> bool:
    if path.suffix.lower() not in SCHEDULE_ENDINGS:
        raise ScheduleError(f"cannot tell the format of {path}; name it {' or '.join(SCHEDULE_ENDINGS)}")
    return path.suffix.lower() == ".json"
