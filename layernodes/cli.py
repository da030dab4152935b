"""The command line: ``layernodes COMMAND ...``, also as ``python -m layernodes COMMAND ...``.

A command is one ``Command``, in a file of its own; it is listed in ``COMMANDS`` and nowhere else, and its file is
imported when it is called, so that help needs neither torch nor Megatron-Core. This is the only module that prints.

Exit codes, of every command::

    0    done, and the answer is yes
    1    done, and the answer is no: the schedule is invalid, tensors differ, nothing fits, the machine has problems
    2    not understood, or could not be done: options, files of another kind, files that are not there, an extra that
         is not installed, a step that failed
    130  interrupted
    141  whatever reads the output has closed it
"""

from __future__ import annotations

import importlib
import os
import sys
from argparse import ArgumentParser
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Final, NamedTuple, NoReturn

from layernodes.command import Command, NoAnswerError, UsageError, spell_out
from layernodes.errors import LayerNodesError, ScheduleError, ScheduleParseError


class Entry(NamedTuple):
    """A subcommand that is not imported yet: module and name of its ``Command``, and its summary."""

    module: str
    name: str
    summary: str

    def load(self) -> Command:
        """Import it."""
        command: Command = getattr(importlib.import_module(self.module), self.name)
        return command


COMMANDS: Final[Mapping[str, Entry]] = {
    "demo": Entry(
        "layernodes.demo.command",
        "DEMO",
        "run a Megatron-Core MoE model on real text, plainly and through the nodes, and compare them bit for bit",
    ),
    "run": Entry(
        "layernodes.commands.run",
        "RUN",
        "run a Megatron-Core MoE model under a schedule and compare it with the plain model bit for bit",
    ),
    "profile": Entry(
        "layernodes.commands.profile",
        "PROFILE",
        "measure what the steps of a Megatron-Core MoE model cost here, and write the costs to a file",
    ),
    "check": Entry(
        "layernodes.commands.check",
        "CHECK",
        "say whether a schedule is valid, and if not, everything that is wrong with it",
    ),
    "show": Entry("layernodes.commands.show", "SHOW", "draw a schedule, one row a step, one column a stream"),
    "simulate": Entry(
        "layernodes.commands.simulate",
        "SIMULATE",
        "predict a schedule's timeline, or read a measured one, and what it adds up to",
    ),
    "optimize": Entry(
        "layernodes.commands.optimize", "OPTIMIZE", "choose the best schedule for given costs, and say how good it is"
    ),
    "explain": Entry(
        "layernodes.commands.explain",
        "EXPLAIN",
        "say why communication is exposed in a run or a schedule, and what would help",
    ),
    "trace": Entry(
        "layernodes.commands.trace", "TRACE", "write a predicted timeline for ui.perfetto.dev or chrome://tracing"
    ),
    "plot": Entry("layernodes.commands.plot", "PLOT", "draw a predicted or measured timeline (needs layernodes[plot])"),
    "doctor": Entry(
        "layernodes.commands.doctor", "DOCTOR", "say which versions, devices and features are usable here, and why not"
    ),
}
"""All subcommands, in the order of the help."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return the exit code; ``arguments`` defaults to the process's own."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    called = next((word for word in given if not word.startswith("-")), "")
    name = "layernodes"
    try:
        parser = _parser(called)
        name = parser.prog
        options, unknown = parser.parse_known_args(spell_out(given))
        command: Command = options.command
        name = f"{parser.prog} {command.name}"
        if unknown:
            raise UsageError(f"unrecognized arguments: {' '.join(unknown)} (see {name} --help)")
        return command.run(options, _write)
    except UsageError as error:
        _complain(name, error)
        return 2
    except LayerNodesError as error:
        _complain(name, error)
        return 1 if _answers_no(error) else 2
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is left is written when Python ends
        return 141
    except OSError as error:
        _complain(name, f"{error.filename or 'a file'} cannot be read or written: {error.strerror}; name another")
        return 2
    except KeyboardInterrupt:
        return 130


def _answers_no(error: LayerNodesError) -> bool:
    """Whether the request was carried out: an invalid schedule has violations, and a text that is none has places."""
    is_invalid = isinstance(error, ScheduleError) and bool(error.violations)
    return isinstance(error, NoAnswerError) or (is_invalid and not isinstance(error, ScheduleParseError))


class _Parser(ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Complain in one line, where argparse prints its usage first and exits."""
        raise UsageError(f"{message} (see {self.prog} --help)")


def _parser(called: str) -> ArgumentParser:
    parser = _Parser(prog="layernodes", description="Transformer layers as typed nodes, over Megatron-Core.")
    parser.add_argument("--version", action="version", version=f"layernodes {_version()}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for name, entry in COMMANDS.items():
        subparser = commands.add_parser(name, help=entry.summary, description=entry.summary)
        if name == called:
            command = entry.load()
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


def _complain(name: str, error: LayerNodesError | str) -> None:
    print(f"{name}: error: {error}", file=sys.stderr, flush=True)
