"""The command line: ``layernodes COMMAND ...``, also as ``python -m layernodes COMMAND ...``.

A command is one ``Command``, in a file of its own; it is listed in ``COMMANDS`` and nowhere else. This is the only
module that prints. Exit codes: 0 as wanted, 1 not so (a mismatch, an error), 2 wrong usage, 130 interrupted.
"""

from __future__ import annotations

import sys
from argparse import ArgumentParser
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Final, NoReturn

from layernodes.command import Command, UsageError
from layernodes.commands.check import CHECK
from layernodes.commands.explain import EXPLAIN
from layernodes.commands.optimize import OPTIMIZE
from layernodes.commands.plot import PLOT
from layernodes.commands.profile import PROFILE
from layernodes.commands.run import RUN
from layernodes.commands.show import SHOW
from layernodes.commands.simulate import SIMULATE
from layernodes.commands.trace import TRACE
from layernodes.demo.command import DEMO
from layernodes.errors import LayerNodesError

COMMANDS: Final[tuple[Command, ...]] = (DEMO, RUN, PROFILE, CHECK, SHOW, SIMULATE, OPTIMIZE, EXPLAIN, TRACE, PLOT)
"""All subcommands, in the order of the help."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return the exit code; ``arguments`` defaults to the process's own."""
    parser = _parser()
    name = parser.prog
    try:
        options = parser.parse_args(arguments)
        command: Command = options.command
        name = f"{parser.prog} {command.name}"
        return command.run(options, _write)
    except UsageError as error:
        _complain(name, error)
        return 2
    except LayerNodesError as error:
        _complain(name, error)
        return 1
    except KeyboardInterrupt:
        return 130


class _Parser(ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Complain in one line, where argparse prints its usage first and exits."""
        raise UsageError(f"{message} (see {self.prog} --help)")


def _parser() -> ArgumentParser:
    parser = _Parser(prog="layernodes", description="Transformer layers as typed nodes, over Megatron-Core.")
    parser.add_argument("--version", action="version", version=f"layernodes {_version()}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for command in COMMANDS:
        subparser = commands.add_parser(command.name, help=command.summary, description=command.summary)
        command.add_arguments(subparser)
        subparser.set_defaults(command=command)
    return parser


def _version() -> str:
    try:
        return version("layernodes")
    except PackageNotFoundError:
        return "(run from a source tree, not installed)"


def _write(text: str) -> None:
    print(text, flush=True)


def _complain(name: str, error: LayerNodesError) -> None:
    print(f"{name}: error: {error}", file=sys.stderr, flush=True)
