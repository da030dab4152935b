"""The subcommands: what they print, what they write, how they fail."""

from __future__ import annotations

import json
from argparse import Action, ArgumentParser
from pathlib import Path

import pytest

from layernodes import cli
from layernodes.command import WGRAD_MODES, spell_out
from layernodes.plan import schedules
from layernodes.plan.costs import CostModel
from layernodes.plan.layer_plan import WgradMode
from layernodes.plan.presets import PRESETS
from layernodes.plan.schedule import PairSchedule, Schedule
from layernodes.plan.shape import ChunkShape


def main(*words: str) -> int:
    """The command line."""
    return cli.main(list(words))


@pytest.fixture
def costs(tmp_path: Path) -> str:
    path = tmp_path / "costs.json"
    CostModel.simple(computation=1e-3, communication=8e-4).save(path)
    return str(path)


def test_show(capsys: pytest.CaptureFixture[str]) -> None:
    """A grid; the text and the JSON form parse back."""
    assert main("show", "combined_1f1b", "--layers", "dense,moe*2", "--wgrad") == 0
    text = capsys.readouterr().out
    assert text.startswith("pre_process | L0 dense | L1 moe | L2 moe | post_process; W:")
    assert "F0.L1.moe_dispatch" in text
    built = schedules.combined_1f1b(ChunkShape.of(["dense", "moe", "moe"]), 3)
    for switch, parse in (("--steps", Schedule.parse), ("--json", Schedule.from_json)):
        assert main("show", "combined_1f1b", "--layers", "dense,moe*2", "--microbatches", "3", switch) == 0
        assert parse(capsys.readouterr().out) == built


@pytest.mark.parametrize(
    "words",
    [
        ["serial"],
        ["combined_1f1b_early_release", "--wgrad"],
        ["forward_forward", "--mtp", "1", "--split-combine"],
        ["forward_only", "--no-ends"],
        ["combined_1f1b", "--pair", "--wgrad", "--wgrad-place", "end"],
        ["combined_1f1b_early_release", "--pair"],
    ],
)
def test_check_says_valid(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Built-in schedules are valid for the shape that they are built for."""
    assert main("check", *words, "--layers", "3") == 0
    assert capsys.readouterr().out.startswith("valid: ")
    assert main("check", *words, "--json") == 0
    assert json.loads(capsys.readouterr().out) == {"valid": True, "violations": [], "advice": []}


def test_check_says_what_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In words, with the grid, and exit code 1."""
    shape = ChunkShape.of(["moe"])
    path = tmp_path / "bad.txt"
    steps = schedules.serial(shape, 1).steps
    Schedule((steps[1], steps[0], *steps[2:-1])).save(path)
    assert main("check", str(path), "--layers", "1", "--microbatches", "1") == 1
    text = capsys.readouterr().out
    assert "2 violations" in text
    assert "B0.pre_process is missing" in text
    assert "-> " in text
    assert main("check", str(path), "--layers", "1", "--microbatches", "1", "--json") == 1
    found = json.loads(capsys.readouterr().out)
    assert [violation["rule"] for violation in found["violations"]] == ["order", "missing"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["show", "seriell"], "neither a built-in schedule"),
        (["show", "missing.txt"], "missing.txt"),
        (["show", "serial", "--layers", "two"], "give '4' or"),
        (["show", "serial", "--layers", "moe*99999"], "more than 10000"),
        (["show", "serial", "--mtp", "-1"], "--mtp is -1; give 0 or more"),
        (["show", "forward_only", "--pair"], "no pair form"),
        (["simulate", "serial", "--costs", "deepsek"], "unknown preset 'deepsek'"),
        (["simulate", "serial", "--costs", "missing.json"], "missing.json"),
        (["plot", "serial", "--costs", "mixtral-8x7b", "-o", "a.bmp"], "--output is a.bmp; name it .png, .svg or .pdf"),
        (["optimize", "--costs", "mixtral-8x7b", "-o", "a.yaml"], "--output is a.yaml; name it .txt or .json"),
        (["run", "--plot", "a.gif"], "--plot is a.gif; name it .png, .svg or .pdf"),
        (["simulate", "serial"], "say with --costs what its steps cost"),
        (["explain", "serial"], "say with --costs what its steps cost"),
        (["explain", "trace.json"], "there is no file trace.json"),
        (["profile", "--repetitions", "0"], "--repetitions 0, --warmup 2; give at least 1 and 0"),
        (["profile", "-o", "nowhere/costs.json"], "nowhere/costs.json, and there is no such folder"),
        (["run", "serial", "--schedule", "own.txt"], "two schedules, serial and --schedule own.txt; name one"),
        (["demo", "--mtp", "-1"], "--mtp is -1; give 0 or more"),
        (["run", "--trace", "nowhere/t.json"], "--trace is nowhere/t.json, and there is no such folder"),
        (["optimize", "--costs", "mixtral-8x7b", "--memory-limit", "1"], "no schedule found that holds at most 1"),
    ],
)
def test_errors_are_words(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    """On standard error, with the exit codes of ``test_exit_codes``."""
    assert main(*words) in (1, 2)
    captured = capsys.readouterr()
    assert captured.err.startswith(f"layernodes {words[0]}: error: ")
    assert message in captured.err
    assert captured.out == ""


def test_simulate(costs: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Picture and figures; JSON has the same ones."""
    assert main("simulate", "combined_1f1b", "--costs", costs, "--layers", "2", "--wgrad") == 0
    text = capsys.readouterr().out
    assert "compute   FF" in text
    assert "makespan               28 ms" in text
    assert main("simulate", "combined_1f1b", "--costs", costs, "--layers", "2", "--wgrad", "--json") == 0
    assert json.loads(capsys.readouterr().out)["makespan"] == pytest.approx(28e-3)


def test_presets_bring_their_layers(capsys: pytest.CaptureFixture[str]) -> None:
    """Without --layers a preset's own number and kinds are taken."""
    assert main("simulate", "forward_only", "--costs", "deepseek-v3", "--microbatches", "1", "--json") == 0
    steps = json.loads(capsys.readouterr().out)["num_steps"]
    assert steps == 2 + 3 * 2 + 58 * 4
    assert PRESETS["deepseek-v3"].num_layers == 61


def test_optimize(costs: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The report, and a file that checks and simulates."""
    path = tmp_path / "best.json"
    words = ["--layers", "2", "--wgrad", "--costs", costs]
    assert main("optimize", *words, "-o", str(path)) == 0
    assert "proved best" in capsys.readouterr().out
    assert main("check", str(path), "--layers", "2", "--wgrad") == 0
    capsys.readouterr()
    assert main("optimize", *words, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["optimal"]
    assert Schedule.load(path) == Schedule.parse(" ".join(found["steps"]))
    assert main("optimize", *words, "--pair", "-o", str(tmp_path / "pair.txt")) == 0
    assert main("check", str(tmp_path / "pair.txt"), "--layers", "2", "--wgrad", "--pair") == 0
    assert len(PairSchedule.load(tmp_path / "pair.txt"))


def test_explain(costs: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A schedule with costs, and a trace of it, have the same causes; JSON has every figure."""
    words = ["combined_1f1b", "--costs", costs, "--layers", "2"]
    assert main("explain", *words) == 0
    text = capsys.readouterr().out
    assert "exposed communication: 6.4 ms of 30.4 ms (21.1 %)" in text
    assert "the most exposed steps:" in text
    assert "what would help, simulated:" in text
    assert "the optimizer's order: 25.6 ms, 15.8 % less" in text
    assert main("explain", *words, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["exposed"] == pytest.approx(6.4e-3)
    trace = str(tmp_path / "trace.json")
    assert main("trace", *words, "-o", trace) == 0
    assert main("plot", trace, "-o", str(tmp_path / "trace.svg")) == 0
    capsys.readouterr()
    assert main("simulate", trace) == 0
    assert "makespan               30.4 ms" in capsys.readouterr().out
    assert main("explain", trace, "--json") == 0
    of_trace = json.loads(capsys.readouterr().out)
    causes = {one["step"]: (one["cause"], one["waiter"]) for one in found["causes"]}
    assert {one["step"]: (one["cause"], one["waiter"]) for one in of_trace["causes"]} == causes
    helps = [{one["change"]: one["makespan"] for one in report["helps"]} for report in (found, of_trace)]
    best = "the optimizer's order"
    assert helps[1][best] == pytest.approx(helps[0][best])
    assert helps[0].keys() - helps[1].keys() == {"weight gradients deferred, in the optimizer's order"}


@pytest.mark.parametrize("command", ["simulate", "explain"])
def test_a_part_of_a_schedule_is_said_to_be_one(
    command: str, costs: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its figures are no figures of a run: a step that was forgotten looks like time saved."""
    whole = schedules.serial(ChunkShape.of(["moe", "moe"]), 2)
    path = tmp_path / "order.txt"
    for steps, is_whole in ((whole.steps, True), (whole.steps[:5] + whole.steps[7:], False)):
        Schedule(steps).save(path)
        assert main(command, str(path), "--costs", costs) == 0
        text = capsys.readouterr().out
        assert ("this is no whole schedule" in text) is not is_whole
    assert "F0.L1.pre_dispatch_computation is missing; add it after F0.L0.moe_combine (and 1 more)" in text


def test_trace_and_plot(costs: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """They write their files."""
    for command, name in (("trace", "t.json"), ("plot", "t.svg")):
        path = tmp_path / name
        assert main(command, "serial", "--costs", costs, "--layers", "1", "-o", str(path)) == 0
        assert path.stat().st_size > 1000
        assert main(command, "serial", "--costs", costs, "--layers", "1", "-o", str(path), "--json") == 0
    assert "written to" in capsys.readouterr().out


@pytest.mark.parametrize("command", ["trace", "plot", "optimize"])
def test_output_without_a_folder(command: str, costs: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A file that cannot be written is wrong usage, said before anything is computed."""
    schedule = [] if command == "optimize" else ["serial"]
    assert main(command, *schedule, "--costs", costs, "-o", str(tmp_path / "none" / "a.json")) == 2
    assert "there is no such folder; make it first" in capsys.readouterr().err


def test_check_names_what_it_checked_against(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A file that is checked against another shape than its own: the shape stands in the answer."""
    path = tmp_path / "own.txt"
    schedules.serial(ChunkShape.of(["dense"]), 1).save(path)
    assert main("check", str(path), "--layers", "2") == 1
    assert capsys.readouterr().out.startswith(
        "invalid for pre_process | L0 moe | L1 moe | post_process, 2 microbatches"
    )


def test_wgrad_place_without_wgrad(capsys: pytest.CaptureFixture[str]) -> None:
    """A place for W steps where nothing is deferred is wrong usage."""
    assert main("check", "serial", "--wgrad-place", "end") == 2
    assert "nothing is deferred; add --wgrad" in capsys.readouterr().err


def test_unknown_option_names_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    """The help that an unknown option points to is that of its command."""
    assert main("check", "serial", "--dense-last") == 2
    assert "unrecognized arguments: --dense-last (see layernodes check --help)" in capsys.readouterr().err


def test_an_option_is_the_same_in_every_command() -> None:
    """Name, values and meaning; only the kinds of layers are not for models that a command makes itself."""
    found: dict[str, Action] = {}
    for entry in cli.COMMANDS.values():
        parser = ArgumentParser()
        entry.load().add_arguments(parser)
        for action in parser._actions:
            for name in action.option_strings:
                first = found.setdefault(name, action)
                differing = {
                    field
                    for field in ("dest", "nargs", "const", "choices", "type")
                    if getattr(first, field) != getattr(action, field)
                }
                assert differing == ({"type"} if name == "--layers" and action.type != first.type else set()), name
    assert set(WGRAD_MODES) == set(WgradMode)


def test_values_that_are_left_out() -> None:
    """``--wgrad`` and ``--mtp`` have one where the next word is none of theirs, a schedule for instance."""
    assert spell_out(["check", "--wgrad", "own.txt", "--mtp"]) == ["check", "--wgrad=auto", "own.txt", "--mtp=1"]
    same = ["--wgrad", "off", "--wgrad", "auto", "--mtp", "2", "--mtp", "-1", "--wgrad=off"]
    assert spell_out(same) == same


@pytest.mark.parametrize("command", ["simulate", "trace", "plot"])
def test_a_trace_takes_no_costs(
    command: str, costs: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What would be ignored is refused: costs of a trace, and a place for the W steps of a trace or a file."""
    monkeypatch.chdir(tmp_path)
    assert main("trace", "serial", "--costs", costs, "--layers", "1", "-o", "run.json") == 0
    assert main(command, "run.json", "--costs", costs) == 2
    assert "run.json is a trace of a run, which says what its steps took; leave --costs out" in capsys.readouterr().err
    assert main(command, "run.json", "--wgrad", "--wgrad-place", "end") == 2
    assert "leave --wgrad-place out" in capsys.readouterr().err
    schedules.serial(ChunkShape.of(["moe"], wgrad=True), 1).save("own.txt")
    assert main(command, "own.txt", "--costs", costs, "--wgrad", "--wgrad-place", "end") == 2
    assert "own.txt says where its W steps are; leave --wgrad-place out" in capsys.readouterr().err
    assert main("explain", "run.json", "--costs", costs) == 0
