"""validate: accepts what is valid, refuses everything else, and names the step."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from layernodes.errors import ScheduleError, Violation
from layernodes.plan import pairs, schedules
from layernodes.plan.schedule import PairSchedule, Schedule
from layernodes.plan.shape import ChunkShape
from layernodes.plan.step import Step
from layernodes.plan.validate import validate, validate_pair
from layernodes.slots import Phase
from layernodes.testing import chunk_shapes
from tests import oracle
from tests.support.strategies import plain, valid_schedules

SHAPE = ChunkShape.of(["moe"], pre_process=False, post_process=False)
DEFERRED = ChunkShape.of(["moe"], pre_process=False, post_process=False, wgrad=["mlp"])


def violations(text: str, shape: ChunkShape = SHAPE, num_microbatches: int = 1, mode: str = "train") -> list[Violation]:
    """What validate finds, or nothing."""
    return found_in(Schedule.parse(text), shape, num_microbatches, mode)


def found_in(schedule: Schedule, shape: ChunkShape, num_microbatches: int, mode: str = "train") -> list[Violation]:
    """What validate finds, or nothing."""
    try:
        validate(schedule, shape, num_microbatches=num_microbatches, mode=mode)  # type: ignore[arg-type]
    except ScheduleError as error:
        assert error.violations
        for violation in error.violations[:20]:
            assert violation.message in str(error)
        return list(error.violations)
    return []


def facts(found: list[Violation]) -> list[tuple[str, str, int | None, str | None]]:
    """Violations without their messages."""
    return [(v.rule, v.step, v.position, v.other) for v in found]


FORWARD = "F0.L0.pre_dispatch_computation F0.L0.moe_dispatch F0.L0.mlp F0.L0.moe_combine "
BACKWARD = "B0.L0.moe_combine B0.L0.mlp B0.L0.moe_dispatch B0.L0.pre_dispatch_computation "


class TestMalformedSchedules:
    """Each kind of fault is one violation with rule, step, position and the other step."""

    def test_w_before_b(self) -> None:
        text = FORWARD + BACKWARD.replace("B0.L0.mlp", "W0.L0.mlp B0.L0.mlp")
        assert facts(violations(text, DEFERRED)) == [("order", "W0.L0.mlp", 5, "B0.L0.mlp")]

    def test_backward_before_forward(self) -> None:
        (violation,) = violations(BACKWARD + FORWARD)
        assert facts([violation]) == [("order", "B0.L0.moe_combine", 0, "F0.L0.moe_combine")]
        assert "only after its whole forward" in violation.message

    def test_backward_inside_forward(self) -> None:
        text = "F0.L0.pre_dispatch_computation F0.L0.moe_dispatch F0.L0.mlp " + BACKWARD + "F0.L0.moe_combine"
        assert facts(violations(text)) == [("order", "B0.L0.moe_combine", 3, "F0.L0.moe_combine")]

    def test_layer_that_does_not_exist(self) -> None:
        (violation,) = violations(FORWARD + BACKWARD + "F0.L1.mlp")
        assert facts([violation]) == [("foreign", "F0.L1.mlp", 8, None)]
        assert "the chunk has one layer, numbered 0" in violation.message

    def test_microbatch_out_of_range(self) -> None:
        (violation,) = violations(FORWARD + BACKWARD + "F1.L0.mlp")
        assert facts([violation]) == [("foreign", "F1.L0.mlp", 8, None)]
        assert "num_microbatches is 1, numbered 0 to 0" in violation.message

    def test_a_step_twice(self) -> None:
        (violation,) = violations(FORWARD + BACKWARD + "B0.L0.mlp")
        assert facts([violation]) == [("duplicate", "B0.L0.mlp", 8, "B0.L0.mlp")]
        assert "stands at step 5 already" in violation.message

    def test_a_step_missing(self) -> None:
        (violation,) = violations(FORWARD + BACKWARD.replace("B0.L0.mlp ", ""))
        assert facts([violation]) == [("missing", "B0.L0.mlp", None, "B0.L0.moe_combine")]
        assert "add it after B0.L0.moe_combine" in violation.message

    def test_first_step_missing(self) -> None:
        (violation,) = violations(FORWARD.split(" ", 1)[1] + BACKWARD)
        assert facts([violation]) == [("missing", "F0.L0.pre_dispatch_computation", None, None)]

    def test_combine_before_dispatch(self) -> None:
        text = "F0.L0.pre_dispatch_computation F0.L0.moe_combine F0.L0.mlp F0.L0.moe_dispatch " + BACKWARD
        assert facts(violations(text)) == [
            ("order", "F0.L0.moe_combine", 1, "F0.L0.mlp"),
            ("order", "F0.L0.mlp", 2, "F0.L0.moe_dispatch"),
        ]

    def test_misspelt_slot(self) -> None:
        (first, second) = violations((FORWARD + BACKWARD).replace("F0.L0.mlp", "F0.L0.mlpx"))
        assert facts([first, second]) == [
            ("unknown_slot", "F0.L0.mlpx", 2, "mlp"),
            ("missing", "F0.L0.mlp", None, "F0.L0.moe_dispatch"),
        ]
        assert "did you mean F0.L0.mlp?" in first.message

    def test_trailing_text(self) -> None:
        with pytest.raises(ScheduleError, match="expected the end of the step"):
            Schedule.parse(FORWARD + BACKWARD + "F0.L0.mlp.")

    def test_unknown_slot_lists_the_layers_slots(self) -> None:
        (violation,) = violations(FORWARD + BACKWARD + "F0.L0.post_attn")
        assert facts([violation]) == [("unknown_slot", "F0.L0.post_attn", 8, None)]
        slots = "pre_dispatch_computation, moe_dispatch, mlp, moe_combine, mtp_post_process"
        assert violation.message.endswith(f"unknown slot 'post_attn': layer 0 has {slots}")

    @pytest.mark.parametrize(
        ("name", "meant"),
        [("mpl", "mlp"), ("dispatch", "moe_dispatch"), ("moe_combined", "moe_combine"), ("banana", None), ("m", None)],
    )
    def test_only_a_plausible_slot_is_suggested(self, name: str, meant: str | None) -> None:
        (violation,) = violations(FORWARD + BACKWARD + f"F0.L0.{name}")
        assert violation.other == meant
        assert ("did you mean" in violation.message) is (meant is not None)

    def test_all_at_once_in_order_of_position(self) -> None:
        text = "B0.L0.moe_combine F0.L0.nope F0.L0.mlp F0.L0.moe_dispatch F0.L0.mlp F3.L9.mlp"
        found = violations(text)
        assert facts(found)[:6] == [
            ("order", "B0.L0.moe_combine", 0, "F0.L0.mlp"),
            ("unknown_slot", "F0.L0.nope", 1, None),
            ("order", "F0.L0.mlp", 2, "F0.L0.moe_dispatch"),
            ("duplicate", "F0.L0.mlp", 4, "F0.L0.mlp"),
            ("foreign", "F3.L9.mlp", 5, None),
            ("foreign", "F3.L9.mlp", 5, None),
        ]
        assert [v.step for v in found[6:]] == [
            "F0.L0.pre_dispatch_computation", "F0.L0.moe_combine",
            "B0.L0.mlp", "B0.L0.moe_dispatch", "B0.L0.pre_dispatch_computation",
        ]  # fmt: skip


class TestWeightGradients:
    """Exactly the deferred slots have a W."""

    def test_deferral_off(self) -> None:
        (violation,) = violations(FORWARD + BACKWARD + "W0.L0.mlp")
        assert facts([violation]) == [("unexpected", "W0.L0.mlp", 8, None)]
        assert "ChunkShape.of(..., wgrad=True)" in violation.message
        assert "wgrad='auto'" in violation.message

    def test_missing_under_deferral(self) -> None:
        (violation,) = violations(FORWARD + BACKWARD, DEFERRED)
        assert facts([violation]) == [("missing", "W0.L0.mlp", None, "B0.L0.mlp")]
        assert "schedules.deferred" in violation.message

    def test_other_slots(self) -> None:
        own = FORWARD + BACKWARD + "W0.L0.mlp "
        (violation,) = violations(own + "W0.L0.moe_dispatch", DEFERRED)
        assert violation.rule == "unexpected"
        assert "layer 0 defers mlp only" in violation.message
        (violation,) = violations(own + "W0.L0.mtp_post_process", DEFERRED)
        assert "does nothing in mtp_post_process" in violation.message

    def test_ends_have_none(self) -> None:
        shape = ChunkShape.of([], wgrad=True)
        (violation,) = violations(
            "F0.pre_process F0.post_process B0.post_process W0.post_process B0.pre_process", shape
        )
        assert facts([violation]) == [("unexpected", "W0.post_process", 3, None)]

    def test_queue(self) -> None:
        two = FORWARD + FORWARD.replace("F0", "F1") + BACKWARD + BACKWARD.replace("B0", "B1")
        assert not violations(two + "W0.L0.mlp W1.L0.mlp", DEFERRED, 2)
        (violation,) = violations(two + "W1.L0.mlp W0.L0.mlp", DEFERRED, 2)
        assert facts([violation]) == [("order", "W1.L0.mlp", 16, "W0.L0.mlp")]
        assert "in the order of its Bs" in violation.message
        reverse = FORWARD + FORWARD.replace("F0", "F1") + BACKWARD.replace("B0", "B1") + BACKWARD
        assert not violations(reverse + "W1.L0.mlp W0.L0.mlp", DEFERRED, 2)


class TestEnds:
    """pre_process and post_process, where the chunk has them."""

    def test_not_there(self) -> None:
        (violation,) = violations(FORWARD + BACKWARD + "F0.post_process")
        assert facts([violation]) == [("foreign", "F0.post_process", 8, None)]
        assert "this chunk has no post_process" in violation.message

    def test_layer_forgotten(self) -> None:
        (violation,) = violations(FORWARD + BACKWARD + "F0.mlp")
        assert violation.rule == "unknown_slot"
        assert "as in F0.L0.mlp" in violation.message

    def test_closest_end(self) -> None:
        shape = ChunkShape.of([])
        found = violations("F0.pre_proces F0.post_process B0.post_process B0.pre_process", shape)
        assert found[0].other == "pre_process"


class TestForwardOnly:
    """mode="forward" has no B and no W."""

    def test_accepts_forwards(self) -> None:
        assert not violations(FORWARD, mode="forward")

    def test_refuses_the_rest(self) -> None:
        found = violations(FORWARD + "B0.L0.moe_combine W0.L0.mlp", DEFERRED, mode="forward")
        assert [(v.rule, v.step) for v in found] == [("unexpected", "B0.L0.moe_combine"), ("unexpected", "W0.L0.mlp")]
        assert "mode 'forward' has no B" in found[0].message

    def test_training_wants_backwards(self) -> None:
        assert {v.rule for v in violations(FORWARD)} == {"missing"}


class TestNumberOfMicrobatches:
    """Given, or as many as the schedule names."""

    def test_counted(self) -> None:
        validate(schedules.serial(SHAPE, 3), SHAPE)
        validate(Schedule(), SHAPE)
        with pytest.raises(ScheduleError, match="microbatch 900000000"):
            validate(Schedule.parse(FORWARD + "F900000000.L0.mlp"), SHAPE)

    def test_given(self) -> None:
        with pytest.raises(ScheduleError) as caught:
            validate(schedules.serial(SHAPE, 2), SHAPE, num_microbatches=3)
        assert {(v.rule, v.step[1]) for v in caught.value.violations} == {("missing", "2")}

    def test_empty(self) -> None:
        with pytest.raises(ScheduleError, match="the schedule is empty"):
            validate(Schedule(), SHAPE, num_microbatches=1)
        validate(Schedule(), SHAPE, num_microbatches=0)
        validate(Schedule(), ChunkShape(pre_process=False, post_process=False), num_microbatches=5)


def test_text_of_the_error() -> None:
    """The text lists the violations and shows the grid with an arrow at the bad step."""
    with pytest.raises(ScheduleError) as caught:
        validate(
            Schedule.parse("F0.L0.pre_dispatch_computation F0.L0.mlp F0.L0.moe_dispatch F0.L0.moe_combine"),
            SHAPE,
            1,
            "forward",
        )
    assert str(caught.value) == (
        "F0.L0.mlp at step 1 runs before F0.L0.moe_dispatch (step 2)\n"
        "   step  compute                         comm\n"
        "      0  F0.L0.pre_dispatch_computation\n"
        "->    1  F0.L0.mlp                                           <- before F0.L0.moe_dispatch\n"
        "      2                                  F0.L0.moe_dispatch\n"
        "      3                                  F0.L0.moe_combine"
    )


def test_text_stays_short() -> None:
    """However much is wrong, the text fits a screen or two; .violations has everything."""
    shape = ChunkShape.of(["moe"] * 20)
    schedule = schedules.serial(shape, 8)
    with pytest.raises(ScheduleError) as caught:
        validate(schedule[::-1], shape, num_microbatches=8)
    assert len(caught.value.violations) > 1000
    assert str(caught.value).count("\n") < 100
    assert "more, in .violations" in str(caught.value)


@settings(deadline=None)
@given(st.data(), chunk_shapes(), st.integers(0, 4), st.sampled_from(["train", "forward"]))
def test_random_valid_schedules_are_accepted(data: st.DataObject, shape: ChunkShape, n: int, mode: str) -> None:
    """Every topological order, with any of its pass-throughs named, is valid."""
    schedule = data.draw(valid_schedules(shape, n, mode))
    assert found_in(schedule, shape, n, mode) == []


def same_verdict(steps: list[str], shape: ChunkShape, num_microbatches: int) -> list[Violation]:
    """What validate finds, after a check that it finds something exactly where the oracle does."""
    found = found_in(Schedule.parse("\n".join(steps)), shape, num_microbatches)
    assert bool(found) == bool(oracle.faults(steps, plain(shape), num_microbatches))
    return found


def names(found: list[Violation], step: str) -> bool:
    return any(step in (violation.step, violation.other) for violation in found)


@settings(deadline=None)
@given(st.data(), chunk_shapes(min_layers=1), st.integers(1, 4))
def test_single_step_mutations_are_refused(data: st.DataObject, shape: ChunkShape, n: int) -> None:
    """Drop, double, swap of two dependent steps, foreign layer: refused by both, and the error names that step."""
    steps = [str(step) for step in data.draw(valid_schedules(shape, n))]
    chunk = plain(shape)
    at = data.draw(st.integers(0, len(steps) - 1))
    step = steps[at]

    if not oracle.is_optional(chunk, *oracle.split(step)[2:]):
        found = same_verdict(steps[:at] + steps[at + 1 :], shape, n)
        assert [(v.rule, v.step) for v in found] == [("missing", step)]

    to = data.draw(st.integers(0, len(steps)))
    found = same_verdict([*steps[:to], step, *steps[to:]], shape, n)
    assert ("duplicate", step) in [(v.rule, v.step) for v in found]

    dependent = [i for i in range(at + 1, len(steps)) if oracle.must_precede(step, steps[i], chunk)]
    phase, _, layer, slot = oracle.split(step)
    if phase == "W":
        dependent += [
            i for i in range(at + 1, len(steps)) if steps[i][0] == "W" and steps[i].endswith(f"L{layer}.{slot}")
        ]
    if dependent:
        other = data.draw(st.sampled_from(dependent))
        swapped = list(steps)
        swapped[at], swapped[other] = swapped[other], swapped[at]
        found = same_verdict(swapped, shape, n)
        assert names(found, steps[other])
        assert any(v.rule == "order" for v in found)

    layers = data.draw(st.integers(shape.num_layers, 10**9 - 1))
    own = Step.parse(step)
    foreign = str(Step(own.phase, own.microbatch, layers, own.slot))
    found = same_verdict([*steps[:at], foreign, *steps[at + 1 :]], shape, n)
    assert ("foreign", foreign) in [(v.rule, v.step) for v in found]
    assert len(found) == 1 + (not oracle.is_optional(chunk, layer, slot))


@settings(deadline=None)
@given(st.data(), chunk_shapes(min_layers=1, max_layers=2), st.integers(1, 3))
def test_any_change_gets_the_oracles_verdict(data: st.DataObject, shape: ChunkShape, n: int) -> None:
    """Moves, swaps and replacements of any steps: accepted where the oracle accepts, refused where it refuses."""
    steps = [str(step) for step in data.draw(valid_schedules(shape, n))]
    everything = oracle.all_steps(plain(shape), n + 1)
    for _ in range(data.draw(st.integers(1, 3))):
        at, to = data.draw(st.integers(0, len(steps) - 1)), data.draw(st.integers(0, len(steps) - 1))
        change = data.draw(st.sampled_from(["move", "swap", "replace"]))
        if change == "move":
            steps.insert(to, steps.pop(at))
        elif change == "swap":
            steps[at], steps[to] = steps[to], steps[at]
        else:
            steps[at] = data.draw(st.sampled_from(everything))
    same_verdict(steps, shape, n)


@settings(deadline=None)
@given(st.data(), st.none() | chunk_shapes(), st.none() | chunk_shapes())
def test_pairs_get_the_oracles_verdict(
    data: st.DataObject, f_shape: ChunkShape | None, b_shape: ChunkShape | None
) -> None:
    """F0 of one shape woven with B1 and W1 of another is valid; one change gets the oracle's verdict."""
    forward = list(data.draw(valid_schedules(f_shape, 1, "forward"))) if f_shape else []
    backward = list(data.draw(valid_schedules(b_shape, 1)).shift(1)) if b_shape else []
    backward = [step for step in backward if step.phase is not Phase.F]
    steps: list[Step] = []
    while forward or backward:
        source = forward if forward and (not backward or data.draw(st.booleans())) else backward
        steps.append(source.pop(0))
    validate_pair(PairSchedule(steps), f_shape, b_shape)
    if steps:
        at, to = data.draw(st.integers(0, len(steps) - 1)), data.draw(st.integers(0, len(steps) - 1))
        steps.insert(to, steps.pop(at))
        bad = oracle.pair_faults(
            [str(s) for s in steps], plain(f_shape) if f_shape else None, plain(b_shape) if b_shape else None
        )
        if bad:
            with pytest.raises(ScheduleError):
                validate_pair(PairSchedule(steps), f_shape, b_shape)
        else:
            validate_pair(PairSchedule(steps), f_shape, b_shape)


class TestPairs:
    """F0 of one chunk, B1 and W1 of another."""

    def test_wrong_microbatch(self) -> None:
        pair = pairs.serial(SHAPE, SHAPE)
        with pytest.raises(ScheduleError, match="in a pair, F is of microbatch 0") as caught:
            validate_pair(PairSchedule([*pair, Step.parse("F1.L0.mlp"), Step.parse("B0.L0.mlp")]), SHAPE, SHAPE)
        assert [(v.rule, v.step) for v in caught.value.violations] == [
            ("foreign", "F1.L0.mlp"),
            ("foreign", "B0.L0.mlp"),
        ]

    def test_side_that_is_not_there(self) -> None:
        pair = pairs.serial(SHAPE, SHAPE)
        with pytest.raises(ScheduleError, match="give forward_shape"):
            validate_pair(pair, None, SHAPE)
        with pytest.raises(ScheduleError, match="give backward_shape"):
            validate_pair(pair, SHAPE, None)
        with pytest.raises(ScheduleError, match="is missing"):
            validate_pair(PairSchedule(), SHAPE, None)
        validate_pair(PairSchedule(), None, None)

    def test_shapes_differ(self) -> None:
        longer = ChunkShape.of(["moe", "dense"])
        validate_pair(pairs.serial(SHAPE, longer), SHAPE, longer)
        with pytest.raises(ScheduleError) as caught:
            validate_pair(pairs.serial(SHAPE, longer), longer, SHAPE)
        assert {v.rule for v in caught.value.violations} == {"foreign", "missing"}


@pytest.mark.full
def test_time_is_linear_in_bad_schedules_too() -> None:
    """20,000 steps that are all wrong take less than two seconds, whatever is wrong with them."""
    shape = ChunkShape.of(["moe"] * 61, wgrad=True)
    schedule = schedules.serial(shape, 32)
    misspelt = Schedule(Step(step.phase, step.microbatch, step.layer, step.slot + "x") for step in schedule)
    queues = Schedule(
        [s for s in schedule if s.phase is not Phase.W] + [s for s in schedule if s.phase is Phase.W][::-1]
    )
    only_w = Schedule(s for s in schedule if s.phase is Phase.W)
    for bad in (schedule[::-1], misspelt, queues, only_w, schedule + schedule, Schedule()):
        start = time.perf_counter()
        assert found_in(bad, shape, 32)
        assert time.perf_counter() - start < 2
