"""``layernodes doctor``: what can be used on this machine, and why not the rest."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from typing import Final

from layernodes.command import Command, Write
from layernodes.commands.common import add_json
from layernodes.doctor import diagnose


def _add_arguments(parser: ArgumentParser) -> None:
    add_json(parser)


def _run(options: Namespace, write: Write) -> int:
    diagnosis = diagnose()
    write(diagnosis.model_dump_json(indent=2) if options.json else str(diagnosis))
    return 1 if diagnosis.problems else 0


DOCTOR: Final = Command(
    name="doctor",
    summary="say which versions, devices and features are usable here, and why not",
    add_arguments=_add_arguments,
    run=_run,
)
