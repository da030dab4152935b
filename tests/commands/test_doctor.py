"""``layernodes doctor``: what it says of this machine is so, and what keeps the package from running is a problem."""

from __future__ import annotations

import json
import platform
from importlib.metadata import version

import pytest
import torch
import torch.distributed as dist

from layernodes import doctor
from layernodes.cli import main
from layernodes.doctor import PACKAGES, diagnose, find_problems
from layernodes.lane import accelerator_with_streams


def test_it_says_what_is_here(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert f"python {platform.python_version()}" in out
    assert f"megatron-core {version('megatron-core')}" in out
    assert "nothing keeps layernodes from running here" in out
    assert max(map(len, out.splitlines())) <= 120


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert set(found["packages"]) == set(PACKAGES)
    usable = {feature["name"]: feature["usable"] for title in ("streams", "backends") for feature in found[title]}
    assert usable["cuda"] == (accelerator_with_streams() is not None)
    assert usable["gloo"] == dist.is_gloo_available()
    assert usable["nccl"] == (dist.is_nccl_available() and torch.cuda.is_available())
    assert all(feature["reason"] for feature in found["features"] if not feature["usable"])


def test_problems() -> None:
    good = diagnose().packages
    assert find_problems(good, (3, 12)) == []
    assert "use 3.12 or newer" in find_problems(good, (3, 11))[0]
    assert "pip install layernodes" in find_problems({**good, "torch": None}, (3, 12))[0]
    for wrong in ("0.19.1", "0.20.0", "1.0"):
        (problem,) = find_problems({**good, "megatron-core": wrong}, (3, 13))
        assert f"megatron-core {wrong} is not supported" in problem
    assert find_problems({**good, "megatron-core": "0.19.3+local"}, (3, 13)) == []


def test_what_is_usable_is_not_explained_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine with a GPU and everything installed, no line says that there is none."""
    everything = {**dict.fromkeys(PACKAGES, "1.0"), "megatron-core": "0.19.2"}
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    features = doctor._features(everything, ["a GPU"])
    assert all(feature.usable for feature in features)
    assert not [feature for feature in features if "no GPU" in feature.reason or "not installed" in feature.reason]
