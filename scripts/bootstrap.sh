#!/bin/sh
# Make .venv with layernodes and the extra named by $1 (test, dev or docs), unless it is there and up to date.
set -eu
cd "$(dirname "$0")/.."
extra="${1:-test}"
stamp=".venv/.layernodes-$extra"

is_recent() {
    "$1" -c 'import sys; sys.exit(sys.version_info < (3, 12))' >/dev/null 2>&1
}

find_python() {
    for name in python3.12 python3.13 python3.14 python3 python; do
        # A pyenv shim is there for versions that are not selected, too: running it is the only test.
        if is_recent "$name"; then
            echo "$name"
            return
        fi
    done
    for path in "${PYENV_ROOT:-$HOME/.pyenv}"/versions/*/bin/python; do
        if is_recent "$path"; then
            echo "$path"
            return
        fi
    done
    cat >&2 <<'MESSAGE'
layernodes needs Python 3.12 or newer, and none was found. Get one with any of

    uv python install 3.12
    pyenv install 3.12
    sudo apt-get install python3.12 python3.12-venv     (Ubuntu 24.04 and newer)
    brew install python@3.12                            (macOS)
    https://www.python.org/downloads/

and run make again.
MESSAGE
    return 1
}

# The stamp holds the checksum of pyproject.toml: a change of dependencies installs again, a checkout of the same does not.
wanted="$(cksum pyproject.toml)"
if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ]; then
    exit 0
fi
if ! { [ -x .venv/bin/python ] && is_recent .venv/bin/python; }; then
    python="$(find_python)"
    echo "creating .venv with $("$python" --version)"
    "$python" -m venv --clear .venv || {
        echo "could not create .venv; on Debian and Ubuntu the package python3.12-venv is needed" >&2
        exit 1
    }
fi
echo "installing layernodes with its '$extra' extra into .venv"
.venv/bin/python -m pip install --quiet --disable-pip-version-check --editable ".[$extra]"
echo "$wanted" >"$stamp"
