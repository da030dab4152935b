"""What a subcommand of ``layernodes`` is: its arguments, and a function from parsed options to an outcome."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from layernodes.errors import LayerNodesError


class UsageError(LayerNodesError, ValueError):
    """A command was given arguments that do not fit; its text is one line and says what to change."""


class Outcome(NamedTuple):
    """What a command has to say, and the process's exit code: 0 as wanted, 1 not so."""

    text: str
    exit_code: int


@dataclass(frozen=True, kw_only=True)
class Command:
    """One subcommand.

    Attributes:
        name, summary: how it is called, and what it does in one line.
        add_arguments: declares its arguments.
        run: does it. Raises UsageError, before anything heavy, for arguments that do not fit.
    """

    name: str
    summary: str
    add_arguments: Callable[[ArgumentParser], None]
    run: Callable[[Namespace], Outcome]
