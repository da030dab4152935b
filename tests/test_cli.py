"""The command line: what it prints, and its exit codes, as a user sees them."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from layernodes.cli import main
from layernodes.demo import command
from layernodes.demo.report import DemoReport
from layernodes.demo.run import demonstrate
from layernodes.plan.costs import CostModel
from tests.demo.faults import build_scaled
from tests.support.launched import launched

SMALL = ("--layers", "1", "--hidden", "16", "--experts", "4", "--microbatches", "2")
_ROOT = Path(__file__).parents[1]


def _rows(text: str, node: str) -> Sequence[str]:
    return [line for line in text.splitlines() if node in line]


def test_demo_prints_slots_losses_and_verdict(capsys: pytest.CaptureFixture[str]) -> None:
    """A small demo says which node fills which slot, both losses, and that every tensor is the same."""
    current_device = torch.cuda.current_device
    assert main(["demo", *SMALL]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert max(map(len, out.splitlines())) <= 100
    for slot, stream, node in (
        ("pre_dispatch_computation", "compute", "PreDispatchNode"),
        ("moe_dispatch", "comm", "DispatchNode"),
        ("mlp", "compute", "ExpertNode"),
        ("moe_combine", "comm", "CombineNode"),
    ):
        (row,) = [row for row in _rows(out, node) if row.split()[1] == slot]
        assert row.split()[2:5] == [stream, node, "2"]
    assert "F0  F1+B0  B1" in out
    assert "bitwise equal: 21 tensors compared (2 outputs, 19 parameter gradients)" in out
    assert torch.cuda.current_device is current_device
    assert not torch.distributed.is_initialized()


def test_demo_json_is_one_document_with_everything_in_it(capsys: pytest.CaptureFixture[str]) -> None:
    """``--json`` prints what parses back into the report, numbers included."""
    assert main(["demo", *SMALL, "--json", "--seed", "7"]) == 0
    report = DemoReport.model_validate_json(capsys.readouterr().out)
    assert report.settings.seed == 7
    assert report.layer_kinds == ("MoE",)
    assert report.verdict.equal
    assert report.verdict.difference is None
    assert len(report.losses) == report.verdict.outputs == 2
    assert all(loss.plain == loss.nodes and 4 < loss.plain < 7 for loss in report.losses)
    assert all(slot.forward > 0 and slot.backward > 0 for slot in report.slots)
    assert report.num_ranks == 1


def test_demo_with_mtp_and_a_dense_last_layer(capsys: pytest.CaptureFixture[str]) -> None:
    """Layers of every kind have rows of their own; a dense layer has no dispatch and no combine."""
    assert main(["demo", *SMALL, "--layers", "2", "--mtp", "--dense-last", "--json"]) == 0
    report = DemoReport.model_validate_json(capsys.readouterr().out)
    assert report.layer_kinds == ("MoE", "dense", "MTP")
    assert [slot.slot for slot in report.slots if slot.layers == "dense"] == ["pre_dispatch_computation", "mlp"]
    assert "mtp_post_process" in [slot.slot for slot in report.slots if slot.layers == "MTP"]


def test_demo_with_mtp_over_a_moe_layer(capsys: pytest.CaptureFixture[str]) -> None:
    """All five slots."""
    assert main(["demo", *SMALL, "--topk", "1", "--mtp", "--json"]) == 0
    report = DemoReport.model_validate_json(capsys.readouterr().out)
    assert len([slot for slot in report.slots if slot.layers == "MTP"]) == 5


def test_demo_on_a_text_of_ones_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Any bytes are tokens; a text shorter than what is asked for is used again."""
    text = tmp_path / "mine.txt"
    text.write_bytes(bytes(range(256)))
    assert main(["demo", *SMALL, "--text", str(text)]) == 0
    assert "mine.txt, 256 bytes" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--topk", "9"], "--topk is 9, but there are only 8 experts; lower --topk or raise --experts"),
        (["--hidden", "30"], "--hidden is 30; it must be a multiple of 8: 4 attention heads, each of even size"),
        (["--microbatches", "0"], "--microbatches is 0; it must be at least 1"),
        (["--layers", "-1"], "--layers is -1; it must be at least 1"),
        (["--layers", "1", "--dense-last"], "--dense-last leaves no MoE layer where --layers is 1"),
        (["--seed", "-1"], "--seed is -1; it must be from 0"),
        (["--text", "nowhere.txt"], "--text nowhere.txt cannot be read: No such file or directory"),
        (["--text", "."], "--text . cannot be read: Is a directory"),
        (["--text", ".python-version"], "--text .python-version has 5 bytes; it must have at least 129"),
        (["--experts", "many"], "argument --experts: invalid int value: 'many'"),
        (["--colour"], "unrecognized arguments: --colour"),
    ],
)
def test_wrong_arguments_are_one_line_and_code_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is refused before anything is built, and says what to change."""
    monkeypatch.chdir(_ROOT)
    monkeypatch.setattr(command, "demo_world", None)
    assert main(["demo", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err
    assert err.startswith("layernodes")
    assert err.count("\n") == 1


def test_experts_that_the_ranks_cannot_share(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the launcher says counts, before any group is made."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["demo", "--experts", "3"]) == 2
    assert "--experts is 3, which 2 ranks cannot share evenly" in capsys.readouterr().err


def test_no_command(capsys: pytest.CaptureFixture[str]) -> None:
    """Without a command the line says where the help is."""
    assert main([]) == 2
    assert "see layernodes --help" in capsys.readouterr().err


def test_a_mismatch_names_the_first_tensor_and_exits_with_1(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node that is wrong by one part in a thousand is found out: name, shape, size and place of the difference."""
    monkeypatch.setattr(command, "demonstrate", functools.partial(demonstrate, build=build_scaled))
    assert main(["demo", *SMALL]) == 1
    out = capsys.readouterr().out
    assert "NOT EQUAL: 21 tensors compared" in out
    assert "first differing tensor  output of microbatch 0" in out
    assert "shape                   (2, 128), on rank 0" in out
    assert "first element           (0, " in out
    assert "ScaledCombineNode" in out
    assert max(map(len, out.splitlines())) <= 100


def test_module_runs_quietly_with_defaults() -> None:
    """``python -m layernodes demo`` as the README says it: the verdict, and nothing on stderr."""
    done = launched("-m", "layernodes", "demo", really=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert "bitwise equal: 100 tensors compared" in done.stdout


def test_two_ranks_share_the_experts() -> None:
    """Under torchrun, unchanged: rank 0 alone prints, and the verdict is that of both ranks."""
    done = launched("-m", "layernodes", "demo", *SMALL, "--mtp", "--json", world_size=2, really=True)
    assert done.returncode == 0, done.stderr
    report = DemoReport.model_validate_json(done.stdout)
    assert (report.num_ranks, report.backend, report.verdict.equal) == (2, "gloo", True)


def test_two_ranks_profile_together(tmp_path: Path) -> None:
    """Under torchrun, unchanged: rank 0 alone writes and prints, and the costs are those that both agreed on."""
    path = tmp_path / "costs.json"
    words = ("--repetitions", "2", "--streams", "threads", "--json", "-o", str(path))
    done = launched("-m", "layernodes", "profile", *SMALL, *words, world_size=2)
    assert done.returncode == 0, done.stderr
    costs = CostModel.from_json(done.stdout)
    assert costs == CostModel.load(path)
    assert costs.measurement is not None
    assert costs.measurement.num_ranks == 2


def test_a_mismatch_on_another_rank_is_everybodys() -> None:
    """A wrong node on rank 1 only: rank 0 prints the verdict, once, and the launcher fails."""
    done = launched("-m", "tests.demo.faults", *SMALL, world_size=2)
    assert done.returncode == 1
    assert done.stdout.count("NOT EQUAL") == 1
    assert "first differing tensor" in done.stdout
