"""Exit codes: 0, done and the answer is yes; 1, done and the answer is no; 2, not understood or not done."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from layernodes import ChunkShape, CostModel, Schedule, cli, schedules
from layernodes.commands import doctor
from layernodes.demo import command
from layernodes.demo.run import demonstrate
from layernodes.doctor import Diagnosis, diagnose
from tests.demo.faults import build_scaled

_SMALL = ["--layers", "1", "--hidden", "16", "--experts", "4", "--microbatches", "2", "--no-dropout"]
_SIMULATED = ["--costs", "costs.json", "--layers", "1"]
_PAGE = Path(__file__).parents[2] / "docs" / "reference" / "command-line.md"

_CODES: dict[str, dict[int, list[list[str]]]] = {
    "demo": {
        0: [_SMALL],
        1: [],  # below: nothing but a wrong node makes it differ
        2: [["--topk", "99"], ["--text", "nowhere.txt"], ["--layers", "0"], ["--layers", "-1"], ["--hidden", "x"]],
    },
    "run": {
        0: [[*_SMALL, "good.txt"]],
        1: [[*_SMALL, "invalid.txt"]],
        2: [["nowhere.txt"], ["costs.json", *_SMALL], ["--microbatches", "0"], ["serial", "--trace", "no/t.json"]],
    },
    "profile": {
        0: [[*_SMALL, "--repetitions", "1", "--streams", "inline"]],
        1: [],  # a measurement has no answer to be no
        2: [["--repetitions", "0"], ["-o", "no/costs.json"], ["--layers", "0"]],
    },
    "check": {
        0: [["serial"], ["good.txt", "--layers", "1"]],
        1: [["invalid.txt", "--layers", "1"], ["good.txt"], ["empty.txt"]],
        2: [["nowhere.txt"], ["trace.json"], ["words.txt"], ["serial", "--layers", "0"], ["good.txt", "--mtp", "-1"]],
    },
    "show": {
        0: [["serial"], ["invalid.txt"], ["empty.txt"]],
        1: [],  # it draws an invalid schedule as well
        2: [["serial", "--microbatches", "0"], ["serial", "--layers", "-2"], ["folder.txt"]],
    },
    "simulate": {
        0: [["serial", *_SIMULATED], ["trace.json"]],
        1: [["invalid.txt", *_SIMULATED]],
        2: [["serial"], ["serial", "--costs", "good.txt"], ["serial", *_SIMULATED, "--width", "1"], ["costs.json"]],
    },
    "optimize": {
        0: [_SIMULATED],
        1: [[*_SIMULATED, "--memory-limit", "1"]],
        2: [
            *([*_SIMULATED, "--memory-limit", "-1"], [*_SIMULATED, "--time-limit", "-1"], [*_SIMULATED, "-o", "s.png"]),
            *([*_SIMULATED, "--microbatches", "0"], ["--costs", "good.txt"], ["--costs", "nothing"], []),
        ],
    },
    "explain": {
        0: [["serial", *_SIMULATED], ["trace.json"]],
        1: [["invalid.txt", *_SIMULATED]],
        2: [["serial"], ["costs.json"], ["nowhere.json"]],
    },
    "trace": {
        0: [["serial", *_SIMULATED, "-o", "t.json"]],
        1: [["invalid.txt", *_SIMULATED]],
        2: [["serial"], ["serial", *_SIMULATED, "-o", "no/t.json"], ["serial", *_SIMULATED, "-o", "folder.txt"]],
    },
    "plot": {
        0: [["serial", *_SIMULATED, "-o", "t.svg"]],
        1: [["invalid.txt", *_SIMULATED]],
        2: [["serial"], ["serial", *_SIMULATED, "-o", "t.bmp"]],
    },
    "doctor": {0: [[]], 1: [], 2: [["--all"]]},  # 1 below: on a machine with problems
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with files of every kind, in which the command runs."""
    monkeypatch.chdir(tmp_path)
    good = schedules.serial(ChunkShape.of(["moe"]), 2)
    good.save("good.txt")
    Schedule(reversed(good.steps)).save("invalid.txt")
    Schedule().save("empty.txt")
    Path("words.txt").write_text("no schedule at all\n")
    Path("folder.txt").mkdir()
    CostModel.simple(computation=1, communication=1).save("costs.json")
    cli.main(["trace", "serial", *_SIMULATED, "-o", "trace.json"])
    yield tmp_path


@pytest.mark.parametrize(
    ("name", "code", "words"),
    [(name, code, words) for name, codes in _CODES.items() for code, cases in codes.items() for words in cases],
    ids=lambda value: " ".join(value) if isinstance(value, list) else str(value),
)
def test_codes(name: str, code: int, words: list[str], folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each command with each code that it can have; an error is one line on standard error, unless it shows a grid."""
    capsys.readouterr()
    assert cli.main([name, *words]) == code
    out, err = capsys.readouterr()
    assert "Traceback" not in err
    if code == 2:
        assert out == ""
        assert re.match(rf"layernodes( {name})?: error: ", err)


def test_every_command_is_here() -> None:
    """A new command says what its codes are."""
    assert _CODES.keys() == cli.COMMANDS.keys()


def test_difference_is_1(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong node in the demonstration."""

    def wrong(*given: object, **named: object) -> object:
        return demonstrate(*given, **named, build=build_scaled)  # type: ignore[arg-type]

    monkeypatch.setattr(command, "demonstrate", wrong)
    assert cli.main(["demo", *_SMALL]) == 1


def test_problems_are_1(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine on which something that is needed is missing."""

    def problems() -> Diagnosis:
        return diagnose().model_copy(update={"problems": ("torch is not installed",)})

    monkeypatch.setattr(doctor, "diagnose", problems)
    assert cli.main(["doctor"]) == 1


def test_reader_that_has_enough() -> None:
    """``layernodes show ... | head -1`` ends without a word."""
    words = [sys.executable, "-m", "layernodes", "show", "serial", "--layers", "2000"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait() == 141


def test_page_has_every_command_and_code() -> None:
    """The table of the reference names each command, what it does, and what its 1 means where it has one."""
    rows = dict(re.findall(r"^\| `layernodes (\w+)` \| (.*) \|$", _PAGE.read_text(), flags=re.MULTILINE))
    assert rows.keys() == cli.COMMANDS.keys()
    for name, row in rows.items():
        what, _, no = row.partition(" | ")
        assert what == cli.COMMANDS[name].summary
        assert (no == "-") == (name in ("profile", "show"))
