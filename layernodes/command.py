"""What a subcommand of ``layernodes`` is: its arguments, and a function from parsed options to an exit code."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from dataclasses import dataclass

from layernodes.errors import LayerNodesError

Write = Callable[[str], None]
"""Prints a text and a newline on standard output; commands print through it only."""


class UsageError(LayerNodesError, ValueError):
    """A command was given arguments that do not fit; its text is one line and says what to change."""


@dataclass(frozen=True, kw_only=True)
class Command:
    """One subcommand.

    Attributes:
        name, summary: how it is called, and what it does in one line.
        add_arguments: declares its arguments.
        run: does it, and returns the process's exit code: 0 as wanted, 1 not so. Raises UsageError, before anything
            heavy, for arguments that do not fit.
    """

    name: str
    summary: str
    add_arguments: Callable[[ArgumentParser], None]
    run: Callable[[Namespace, Write], int]
