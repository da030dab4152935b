"""Two ranks of an expert-parallel group on thread streams: plain bits, the comparison of schedules, failures."""

from __future__ import annotations

import pytest

from tests.support.cells import is_ordered
from tests.support.configs import CELLS
from tests.support.full import FULL
from tests.support.idle_rank import IDLE, check_idle_rank
from tests.support.ranks import run_on_ranks, values_on_ranks
from tests.support.stream_rank_cases import ABSENT

_CASES = "tests.support.rank_cases"


def test_schedules_equal_plain_on_two_ranks() -> None:
    """combined_1f1b, forward_forward and 20 random schedules, with random delays on each rank, give plain bits."""
    names = ["alltoall-moe-ep2", "allgather-mtp-ep2"]
    assert values_on_ranks(f"{_CASES}:equal_plain", names, 10) == [{}, {}]


@pytest.mark.parametrize("kind", ["ep2", "tp2"])
def test_cells_of_two_ranks(kind: str) -> None:
    """A random schedule of every cell of two ranks (of some by default) gives plain bits."""
    cells = [c for c in CELLS if c.world_size == 2 and (c.tp == 2) is (kind == "tp2")]
    names = [c.name for c in cells if not is_ordered(c) and "expert-bias-padding" not in c.name]
    names = names if FULL else names[:: 4 if kind == "tp2" else 16]
    assert values_on_ranks(f"{_CASES}:equal_plain", names, 1, seconds=500) == [{}, {}]


def test_steps_finish_in_order_whatever_the_delays() -> None:
    """Both ranks finish each lane's steps in the schedule's order."""
    first, second = values_on_ranks(f"{_CASES}:finishing_order", "alltoall-moe-ep2")
    lanes = [{name: [s for n, s in done if n == name] for name, _ in done} for done in (first, second)]
    assert len(lanes[0]) == 2
    assert lanes[0] == lanes[1]


def test_different_schedules_are_a_mismatch_on_both_ranks() -> None:
    """RankMismatchError on both, again and again, never a hang; the group and the chunk serve on."""
    first, second = values_on_ranks(f"{_CASES}:mismatches", "alltoall-moe-ep2")
    for seen in (first, second):
        for case in ("other 0", "other 1", "swapped", "fewer"):
            kind, message, seconds = seen[case]
            assert kind == "RankMismatchError", (case, seen[case])
            assert "another schedule" in message
            assert "ranks [0]" in message
            assert "ranks [1]" in message
            assert seconds < 10
        assert seen["same 0"] == seen["same 1"] == seen["afterwards"] == "ran"
        assert seen["invalid on both"][0] == "ScheduleError"
        assert seen["joined"] == "RankMismatchError"
        assert seen["right"] == []
        assert seen["threads"] == []
    assert first["invalid on one"][0] == "RankMismatchError"
    assert second["invalid on one"][0] == "ScheduleError"
    assert first["bad batch"] == "BatchError"
    assert second["bad batch"] == "RankMismatchError"


def test_a_killed_rank_is_an_error_on_the_other() -> None:
    """A StepError within the timeout of the groups, counted from the last step that went well."""
    seconds = 5.0
    survivor, victim = run_on_ranks(
        f"{_CASES}:killed_peer", "alltoall-moe-ep2", seconds, group_seconds=seconds, seconds=60
    )
    assert victim.exit_code == -9, victim.log
    assert not survivor.error, survivor.error
    assert survivor.value["step"] is not None
    assert survivor.value["completed"] > 0
    assert survivor.value["seconds"] < seconds
    assert survivor.value["thread"] < seconds


def test_a_node_that_raises_is_an_error_on_both_ranks() -> None:
    """On its own rank at once; on the other, which waits in a collective, within the timeout of the groups.

    So is a rank that never comes to the comparison of schedules.
    """
    seconds = 3.0
    other, failing = values_on_ranks("tests.support.stream_rank_cases:raising_node", "alltoall-moe-ep2", seconds)
    assert other[ABSENT]["step"] is not None
    assert other[ABSENT]["seconds"] < seconds + 1
    assert failing.pop(ABSENT)["step"] is None
    for step, seen in failing.items():
        assert seen["step"] == step
        assert seen["cause"] == "ValueError"
        assert seen["seconds"] < 1.5
        assert seen["thread"] < seconds + 1  # its other lane may wait in a collective
        assert other[step]["step"] is not None
        assert other[step]["cause"] != "ValueError"
        assert other[step]["seconds"] < seconds + 1
        assert other[step]["thread"] < seconds + 1


def test_a_rank_without_tokens() -> None:
    """Its experts' gradients are zeros, not None, and nothing hangs (case 14)."""
    first, second = values_on_ranks(f"{_CASES}:empty_rank", IDLE)
    check_idle_rank(first, second)
