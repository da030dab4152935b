"""What a subcommand of ``layernodes`` is: its arguments, and a function from parsed options to an exit code."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from layernodes.errors import LayerNodesError

Write = Callable[[str], None]
"""Prints a text and a newline on standard output; commands print through it only."""


class UsageError(LayerNodesError, ValueError):
    """A command was given arguments that do not fit; its text is one line and says what to change."""


class NoAnswerError(LayerNodesError, ValueError):
    """A request that was understood and carried out, and whose answer is no."""


@dataclass(frozen=True, kw_only=True)
class Command:
    """One subcommand.

    Attributes:
        name, summary: how it is called, and what it does in one line.
        add_arguments: declares its arguments.
        run: does it, and returns the process's exit code, as ``layernodes.cli`` has them. Raises UsageError, before
            anything heavy, for arguments that do not fit.
    """

    name: str
    summary: str
    add_arguments: Callable[[ArgumentParser], None]
    run: Callable[[Namespace, Write], int]


WGRAD_MODES: Final = ("auto", "off")
_SHORT: Final = {"--wgrad": "--wgrad=auto", "--mtp": "--mtp=1"}


def add_wgrad(parser: ArgumentParser) -> None:
    """Whether weight gradients are deferred, as every command has it."""
    parser.add_argument(
        "--wgrad",
        choices=WGRAD_MODES,
        default="off",
        help="auto, or nothing behind it: weight gradients are deferred, to W steps (default: off)",
    )


def add_mtp(parser: ArgumentParser) -> None:
    """The number of multi-token-prediction layers, as every command has it."""
    parser.add_argument(
        "--mtp", type=int, default=0, metavar="N", help="N MTP layers after them; nothing behind it: 1 (default: 0)"
    )


def spell_out(words: Iterable[str]) -> list[str]:
    """The words of a command line, with the value of each option whose value was left out.

    argparse alone would take the schedule in ``--wgrad order.txt`` for it.
    """
    return [
        _SHORT.get(word, word) if following not in WGRAD_MODES and not following.lstrip("-").isdecimal() else word
        for word, following in pairwise([*words, ""])
    ]
