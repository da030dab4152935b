"""The package as people get it: wheel and sdist, installed into an empty environment, away from the source tree."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest

from layernodes.cli import main

_ROOT = Path(__file__).parents[1]
_DEMO = ("demo", "--layers", "1", "--hidden", "16", "--experts", "4", "--microbatches", "2", "--json")


def _call(*command: str, folder: Path) -> str:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    environment |= {"OMP_NUM_THREADS": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def _contents(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the source, without what builds and tests leave behind."""
    copy = tmp_path_factory.mktemp("source") / "tree"
    left_out = shutil.ignore_patterns(
        ".*_cache", "__pycache__", ".venv", ".git", ".hypothesis", "dist", "build", "site"
    )
    shutil.copytree(_ROOT, copy, ignore=left_out, symlinks=True)
    return copy


@pytest.fixture(scope="module")
def built(source: Path) -> tuple[Path, Path]:
    """The sdist, and the wheel built from it."""
    folder = source.parent / "dist"
    _call(sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(source), folder=source.parent)
    (sdist,) = folder.glob("*.tar.gz")
    (wheel,) = folder.glob("*.whl")
    return sdist, wheel


@pytest.fixture(scope="module")
def python(built: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment that has the wheel, and sees this one's packages but not the source tree."""
    home = tmp_path_factory.mktemp("environment")
    venv.create(home, symlinks=True)
    interpreter = home / "bin" / "python"
    _call(
        *(sys.executable, "-m", "pip", "--python", str(interpreter), "install", "--quiet", "--no-index", "--no-deps"),
        str(built[1]),
        folder=home,
    )
    (packages,) = home.glob("lib/python*/site-packages")
    (packages / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return interpreter


class TestBuild:
    """What is in the archives."""

    def test_wheel(self, built: tuple[Path, Path]) -> None:
        """Every module, the type marker and the demo's text; nothing else."""
        names = set(_contents(built[1]))
        inside = {path.relative_to(_ROOT).as_posix() for path in (_ROOT / "layernodes").rglob("*.py")}
        inside |= {"layernodes/py.typed", "layernodes/demo/alice.txt"}
        assert {name for name in names if ".dist-info/" not in name} == inside
        assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)

    def test_sdist_builds_the_same_wheel(self, source: Path, built: tuple[Path, Path], tmp_path: Path) -> None:
        _call(
            *(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path), str(source)),
            folder=tmp_path,
        )
        (direct,) = tmp_path.glob("*.whl")
        assert _contents(direct) == _contents(built[1])

    def test_sdist_has_tests_and_docs(self, built: tuple[Path, Path]) -> None:
        with tarfile.open(built[0]) as archive:
            names = {name.partition("/")[2] for name in archive.getnames()}
        assert {"tests/oracle.py", "docs/examples/own_moe.py", "CHANGELOG.md", "Makefile", "pyproject.toml"} <= names


class TestInstalled:
    """What the wheel does in an environment of its own, from an empty directory."""

    def test_demo_has_the_same_verdict(self, python: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(_DEMO) == 0
        here = json.loads(capsys.readouterr().out)
        there = json.loads(_call(str(python.with_name("layernodes")), *_DEMO, folder=tmp_path))
        assert there["verdict"] == here["verdict"]
        assert there["verdict"]["equal"] is True

    def test_a_users_program_runs_on_the_wheel(self, python: Path, tmp_path: Path) -> None:
        shutil.copy(_ROOT / "tests" / "typed_sample.py", tmp_path)
        program = (
            "import layernodes, layernodes.cpu, typed_sample\n"
            "assert typed_sample.main()\n"
            "print(layernodes.__file__)\n"
            "print(layernodes.cpu.__file__)\n"
        )
        lines = _call(str(python), "-c", program, folder=tmp_path).splitlines()
        assert [Path(line).is_relative_to(python.parents[1]) for line in lines] == [True, True]
        assert _call(str(python.with_name("layernodes")), "--version", folder=tmp_path) == f"layernodes {_version()}\n"


def _version() -> str:
    lines: Sequence[str] = (_ROOT / "pyproject.toml").read_text().splitlines()
    (line,) = [line for line in lines if line.startswith("version = ")]
    return line.split('"')[1]
