"""``scripts/bootstrap.sh``, which every make target runs first: it finds a Python, or says plainly how to get one."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[1]
_TOOLS = ("sh", "make", "dirname", "cksum", "cat", "mkdir", "chmod")
_NEW, _OLD, _NOT_SELECTED = "3.12", "3.11", "pyenv"

# Stands for an interpreter: answers what it is asked for its version, and makes a .venv that notes what pip is told.
_PYTHON = """#!/bin/sh
case "$1 $2" in
    "-c "*) exit {exit_code} ;;
    "--version ") echo "Python {version} of {name}" ;;
    "-m venv")
        mkdir -p .venv/bin
        echo "made by {name}" >.venv/made
        printf '#!/bin/sh\\n[ "$1" = -c ] || echo "$@" >>.venv/told\\n' >.venv/bin/python
        chmod +x .venv/bin/python ;;
esac
"""


def _interpreter(path: Path, version: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    exit_code = {_NEW: 0, _OLD: 1, _NOT_SELECTED: 127}[version]
    path.write_text(_PYTHON.format(exit_code=exit_code, version=version, name=path))
    path.chmod(0o755)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """What the script needs of a checkout, beside a ``bin`` with the tools that it uses and no Python."""
    for name in ("Makefile", "pyproject.toml", "scripts/bootstrap.sh"):
        (tmp_path / "checkout" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(_ROOT / name, tmp_path / "checkout" / name)
    (tmp_path / "bin").mkdir()
    for tool in _TOOLS:
        found = shutil.which(tool)
        assert found is not None, f"{tool} is needed for this test"
        (tmp_path / "bin" / tool).symlink_to(found)
    return tmp_path / "checkout"


def _run(checkout: Path, *command: str) -> subprocess.CompletedProcess[str]:
    home = checkout.parent
    environment = {"PATH": str(home / "bin"), "HOME": str(home)}
    return subprocess.run(
        [str(home / "bin" / command[0]), *command[1:]],
        cwd=checkout,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize("target", ["test", "demo", "full", "lint"])
@pytest.mark.parametrize("there", [{}, {"python3": _OLD, "python3.12": _NOT_SELECTED}], ids=["none", "too old"])
def test_no_python(checkout: Path, target: str, there: dict[str, str]) -> None:
    """Every target ends with how to get one, an exit code and no half-made .venv."""
    for name, version in there.items():
        _interpreter(checkout.parent / "bin" / name, version)
    _interpreter(checkout.parent / ".pyenv" / "versions" / "3.11.7" / "bin" / "python", _OLD)
    done = _run(checkout, "make", target)
    assert done.returncode != 0
    assert "layernodes needs Python 3.12 or newer, and none was found. Get one with any of" in done.stderr
    for way in ("uv python install 3.12", "pyenv install 3.12", "apt-get install python3.12", "brew install", "https:"):
        assert way in done.stderr
    assert "not found" not in done.stderr and "could not create" not in done.stderr
    assert not (checkout / ".venv").exists()


@pytest.mark.parametrize(
    ("on_path", "of_pyenv", "chosen"),
    [
        ({"python3": _NEW}, {}, "bin/python3"),
        ({"python": _NEW, "python3": _OLD}, {}, "bin/python"),
        ({"python3": _OLD, "python3.12": _NOT_SELECTED, "python3.13": _NEW, "python": _OLD}, {}, "bin/python3.13"),
        ({"python3": _NEW, "python3.12": _NEW, "python3.14": _NEW}, {}, "bin/python3.12"),
        ({"python3": _OLD}, {"3.11.7": _OLD, "3.12.1": _NEW}, ".pyenv/versions/3.12.1/bin/python"),
        ({"python3": _NEW}, {"3.12.1": _NEW}, "bin/python3"),
    ],
    ids=["only one", "the third name", "past a shim", "several", "of pyenv", "path before pyenv"],
)
def test_a_suitable_one_is_chosen(
    checkout: Path, on_path: dict[str, str], of_pyenv: dict[str, str], chosen: str
) -> None:
    """The first that really is recent enough makes .venv; the package is installed into that, once."""
    home = checkout.parent
    for name, version in on_path.items():
        _interpreter(home / "bin" / name, version)
    for name, version in of_pyenv.items():
        _interpreter(home / ".pyenv" / "versions" / name / "bin" / "python", version)
    done = _run(checkout, "sh", "scripts/bootstrap.sh", "test")
    assert (done.returncode, done.stderr) == (0, "")
    assert (checkout / ".venv" / "made").read_text() == f"made by {home / chosen}\n"
    told = (checkout / ".venv" / "told").read_text()
    assert told.startswith("-m pip install") and told.endswith("--editable .[test]\n") and told.count("\n") == 1
    again = _run(checkout, "sh", "scripts/bootstrap.sh", "test")
    assert (again.returncode, again.stdout) == (0, "")
    assert (checkout / ".venv" / "told").read_text() == told
    (checkout / "pyproject.toml").write_text("# other dependencies")
    assert "installing" in _run(checkout, "sh", "scripts/bootstrap.sh", "test").stdout
    assert (checkout / ".venv" / "told").read_text() == 2 * told
