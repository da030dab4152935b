"""Commands are imported when they are called: help needs neither torch nor Megatron-Core."""

from __future__ import annotations

import subprocess
import sys

import pytest

from layernodes.cli import COMMANDS, main


@pytest.mark.parametrize("name", COMMANDS)
def test_entry_is_its_command(name: str) -> None:
    """What the list says of a command is what the command says of itself."""
    command = COMMANDS[name].load()
    assert (command.name, command.summary) == (name, COMMANDS[name].summary)


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["show", "serial", "--layers", "1"]])
def test_light_commands_import_no_framework(arguments: list[str]) -> None:
    program = (
        "import sys\n"
        "from layernodes.cli import main\n"
        "try:\n"
        f"    code = main({arguments!r})\n"
        "except SystemExit as leaving:\n"
        "    code = leaving.code\n"
        "assert not code, code\n"
        "assert not {'torch', 'megatron'} & set(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


def test_unknown_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["nothing"]) == 2
    assert "invalid choice: 'nothing'" in capsys.readouterr().err
