"""Two threads hand over to each other: every wait is kept and every failure surfaces, whatever their timing."""

from __future__ import annotations

import random
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from layernodes.streams import NO_WAIT, ThreadStreams


@dataclass(frozen=True)
class _Task:
    lane: int
    index: int
    position: int
    waits_for: int
    is_awaited: bool = True

    @property
    def text(self) -> str:
        return str(self.position)


def _random_tasks(draw: random.Random) -> list[_Task]:
    tasks: list[_Task] = []
    counts = [0, 0]
    for position in range(draw.randint(1, 40)):
        lane = draw.randint(0, 1)
        other = counts[1 - lane]
        waits_for = NO_WAIT if other == 0 or draw.random() < 0.3 else draw.randint(0, other - 1)
        tasks.append(_Task(lane, counts[lane], position, waits_for))
        counts[lane] += 1
    return tasks


@pytest.fixture
def switching_often() -> Iterator[None]:
    """Threads take turns after every microsecond."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


@pytest.mark.timeout(120)
def test_waits_and_failures(switching_often: None) -> None:
    """A task runs after those before it in its lane and after the one that it waits for; one in five fails."""
    for seed in range(400):
        draw = random.Random(seed)
        tasks = _random_tasks(draw)
        failing = draw.choice(tasks) if draw.random() < 0.2 else None
        done: list[tuple[int, int]] = []

        def perform(
            task: _Task, lane: object, failing: _Task | None = failing, done: list[tuple[int, int]] = done
        ) -> None:
            assert task.waits_for == NO_WAIT or (1 - task.lane, task.waits_for) in done
            assert task.index == 0 or (task.lane, task.index - 1) in done
            if task.position % 7 == 0:
                time.sleep(0)
            if task is failing:
                raise ValueError(task.text)
            done.append((task.lane, task.index))

        if failing is None:
            spans = ThreadStreams[_Task]().run(tasks, perform)
            assert len(done) == len(spans) == len(tasks)
            assert all(0 < start <= end for start, end in spans)
        else:
            with pytest.raises(ValueError, match=f"^{failing.text}$"):
                ThreadStreams[_Task]().run(tasks, perform)
            assert (failing.lane, failing.index) not in done
    assert [thread.name for thread in threading.enumerate() if thread.name == "layernodes-comm"] == []
