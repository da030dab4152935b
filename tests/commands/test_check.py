"""``layernodes check`` of a file: what its own steps imply in a line each, and short lists of what is wrong."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest

from layernodes import cli
from layernodes.plan import pairs, schedules
from layernodes.plan.schedule import PairSchedule, Schedule
from layernodes.plan.shape import ChunkShape
from layernodes.plan.step import Step
from layernodes.slots import Phase

_MOE = ChunkShape.of(["moe"] * 4)
_DEFERRED = ChunkShape.of(["moe"] * 4, wgrad=True)


@pytest.fixture
def check(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str]]:
    """Saves a schedule, checks it, and gives the exit code and what is printed."""

    def call(schedule: Schedule | PairSchedule, *words: str) -> tuple[int, str]:
        path = tmp_path / "own.txt"
        schedule.save(path)
        code = cli.main(["check", str(path), *words])
        return code, capsys.readouterr().out

    return call


@pytest.mark.parametrize(
    ("schedule", "lines"),
    [
        (schedules.serial(_DEFERRED, 2), ["it has W steps: add --wgrad auto"]),
        (schedules.serial(_MOE, 3), ["it has microbatches 0 to 2: say --microbatches 3"]),
        (schedules.serial(_MOE, 1), ["it has microbatch 0 alone: say --microbatches 1"]),
        (schedules.serial(ChunkShape.of(["moe"]), 2), ["it has 1 layer, moe: say --layers 'moe'"]),
        (
            schedules.serial(ChunkShape.of(["dense"] * 2 + ["moe"]), 2),
            ["it has 3 layers, dense*2,moe: say --layers 'dense*2,moe'"],
        ),
        (
            schedules.serial(ChunkShape.of(["moe"] * 4, mtp=1), 2),
            ["it has steps of mtp_post_process, in 1 layer: say --mtp 1"],
        ),
        (
            schedules.serial(ChunkShape.of(["moe"] * 4, split_combine=True), 2),
            ["it has steps of post_combine: add --split-combine"],
        ),
        (
            schedules.serial(ChunkShape.of(["moe"] * 4, pre_process=False, post_process=False), 2),
            ["it has no steps of pre_process and post_process: add --no-ends"],
        ),
        (schedules.forward_only(_MOE, 2), ["it has forward steps alone: add --forward if that is all it is for"]),
        (
            pairs.serial(_DEFERRED, _DEFERRED),
            [
                "it has F of microbatch 0, and B of microbatch 1, as a pair has: add --pair",
                "it has W steps: add --wgrad auto",
            ],
        ),
        (
            schedules.serial(ChunkShape.of(["dense"], wgrad=True), 5),
            [
                "it has microbatches 0 to 4: say --microbatches 5",
                "it has W steps: add --wgrad auto",
                "it has 1 layer, dense: say --layers 'dense'",
            ],
        ),
    ],
    ids=lambda value: value[0][7:30] if isinstance(value, list) else "",
)
def test_options_that_the_steps_imply(
    schedule: Schedule | PairSchedule, lines: list[str], check: Callable[..., tuple[int, str]]
) -> None:
    """A valid schedule under the wrong options: a line for each option, and that it is valid with them; as it is."""
    code, text = check(schedule)
    head, *found, last = text.splitlines()
    assert code == 1
    assert head.startswith(
        "invalid for pre_process | L0 moe | L1 moe | L2 moe | L3 moe | post_process, 2 microbatches: "
    )
    assert [line.strip() for line in found] == lines
    assert last.startswith("so it is valid, for ")
    options = [word for line in lines for word in shlex.split("--" + line.partition("--")[2].partition(" if ")[0])]
    assert check(schedule, *options)[0] == 0


def test_options_that_are_too_many(check: Callable[..., tuple[int, str]]) -> None:
    """What is given and is not in the steps is told as well."""
    code, text = check(schedules.serial(_MOE, 2), "--wgrad")
    assert code == 1
    assert "it has no W steps: leave --wgrad out\nso it is valid, for " in text
    code, text = check(schedules.serial(_MOE, 2), "--no-ends")
    assert "it has steps of pre_process and post_process: leave --no-ends out\nso it is valid, for " in text


def test_what_is_left_with_the_implied_options(check: Callable[..., tuple[int, str]]) -> None:
    """Real faults are not lost among those of the options: they alone are listed and drawn."""
    steps = list(schedules.serial(_DEFERRED, 4))
    steps.remove(Step(Phase.W, 2, 1, "mlp"))
    code, text = check(Schedule(steps))
    assert code == 1
    assert "mlp, 4 microbatches, 1 violation:\n  W2.L1.mlp is missing; add it after B2.L1.mlp" in text
    assert len(text.splitlines()) < 20


def test_many_violations_are_grouped(check: Callable[..., tuple[int, str]]) -> None:
    """By rule, with counts and the first three; all of them with --all and with --json."""
    good = schedules.serial(_MOE, 2)
    bad = Schedule([*good[:40], *good[:20], *reversed(good[40:])])
    code, text = check(bad)
    assert code == 1
    assert "  duplicate: 20 violations\n    F0.pre_process at step 40 stands at step 0 already; leave one of" in text
    assert "\n    and 17 more\n" in text
    assert text.count("stands at step") == 3
    assert "\n  list all with --all\n" in text
    assert len(text.splitlines()) < 40
    code, everything = check(bad, "--all")
    assert everything.count("stands at step") == 20
    assert "list all" not in everything
    code, as_json = check(bad, "--json")
    found = json.loads(as_json)
    assert code == 1
    assert len(found["violations"]) == int(text.partition("microbatches: ")[2].split()[0])
    assert found["advice"] == []
    _, as_json = check(schedules.serial(_DEFERRED, 1), "--json")
    assert json.loads(as_json)["advice"] == ["say --microbatches 1", "add --wgrad auto"]


def test_numbers_beyond_reason(check: Callable[..., tuple[int, str]]) -> None:
    """A layer of number 999999999 is a violation, and nothing is made of that size."""
    code, text = check(Schedule([*schedules.serial(_MOE, 2), Step.parse("F0.L999999999.mlp")]))
    assert code == 1
    assert "F0.L999999999.mlp at step 72 is of a layer that does not exist" in text
    assert "it has" not in text
