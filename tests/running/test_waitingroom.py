"""Callers wait for room in the order in which they came."""

import contextlib
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from random import Random
from typing import Any

import pytest
from pipelines import double, local, request, wait_until

from autosplit.errors import DeadlineError, RefusedError, UsageError
from autosplit.running.pipeline import InProcess, Pipeline
from autosplit.running.waitingroom import WaitingRoom

pytestmark = pytest.mark.timeout(30)


class Hall:
    """Places behind an waiting_room, and who has entered."""

    def __init__(self) -> None:
        self.condition = threading.Condition()
        self.places = 0
        self.entered: list[str] = []
        self.refused: list[str] = []
        self.waiting_room = WaitingRoom(self.condition, lambda: self.places > 0, lambda: None)

    def come(self, name: str, timeout_s: float | None = None) -> threading.Thread:
        """Send a caller in a thread of its own, and return once it waits or has gone."""
        before = self.waiting_room._num_here

        def ask() -> None:
            with self.condition:
                if self.waiting_room.enter(timeout_s):
                    self.places -= 1
                    self.entered.append(name)
                else:
                    self.refused.append(name)

        thread = threading.Thread(target=ask, daemon=True)
        thread.start()
        wait_until(lambda: self.waiting_room._num_here > before or not thread.is_alive())
        return thread

    def free(self, num_places: int) -> None:
        with self.condition:
            self.places += num_places
            self.waiting_room.wake(num_places)


def test_the_first_who_came_is_the_first_who_enters() -> None:
    hall = Hall()
    callers = [hall.come(name) for name in "abc"]
    for number, caller in enumerate(callers):
        hall.free(1)
        caller.join(10)
        assert hall.entered == list("abc"[: number + 1])


def test_a_newcomer_does_not_take_the_place_of_one_who_waits() -> None:
    hall = Hall()
    waiting = hall.come("waiting")
    hall.places = 1  # there is room, and nobody was called yet
    newcomer = hall.come("newcomer")
    hall.come("at once", 0.0).join(10)
    assert hall.entered == [] and hall.refused == ["at once"] and not hall.waiting_room.is_free()
    hall.free(0)
    waiting.join(10)
    hall.free(1)
    newcomer.join(10)
    assert hall.entered == ["waiting", "newcomer"]
    hall.places = 1
    assert hall.waiting_room.is_free()


def test_one_who_is_interrupted_passes_the_call_on(monkeypatch: pytest.MonkeyPatch) -> None:
    hall = Hall()
    wait, calls = hall.condition.wait, iter([KeyboardInterrupt, None])

    def interrupted(timeout_s: float) -> bool:
        failure = next(calls)
        found = wait(timeout_s)
        if failure is not None:
            raise failure
        return found

    monkeypatch.setattr(hall.condition, "wait", interrupted)
    monkeypatch.setattr(threading, "excepthook", lambda args: hall.refused.append(args.exc_type.__name__))
    first, second = hall.come("first"), hall.come("second")
    hall.free(1)
    for caller in (first, second):
        caller.join(10)
    assert hall.entered == ["second"] and hall.refused == ["KeyboardInterrupt"]


def test_one_whose_time_is_over_goes() -> None:
    hall = Hall()
    start = time.monotonic()
    hall.come("late", 0.05).join(10)
    assert hall.refused == ["late"] and time.monotonic() - start >= 0.05


def test_nobody_waits_once_it_is_over() -> None:
    hall = Hall()
    waiting = hall.come("waiting")
    with hall.condition:
        hall.waiting_room.end()
    for caller in (waiting, hall.come("newcomer")):
        caller.join(10)
    assert sorted(hall.entered) == ["newcomer", "waiting"]


def test_a_thread_that_must_not_wait_is_told_so() -> None:
    def refuse() -> None:
        raise UsageError("a callback cannot wait")

    condition = threading.Condition()
    waiting_room = WaitingRoom(condition, lambda: False, refuse)
    with condition, pytest.raises(UsageError, match="cannot wait"):
        waiting_room.enter(None)
    with condition:
        assert not waiting_room.enter(0.0)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("make", "replicas"), [(partial(Pipeline, max_in_flight=2), 2), (Pipeline, 1), (InProcess, 2)])
def test_threads_with_limits_of_time_never_wait_for_ever(make: Callable[..., Any], replicas: int, seed: int) -> None:
    with make([local("a", double, "x", "y", replicas=replicas)], ["x"], ["y"], queue_capacity=seed) as engine:

        def ask(seed: int) -> None:
            random = Random(seed)
            for number in range(30):
                limits = {"timeout_s": random.choice([None, 0.0, 1e-3]), "deadline_s": random.choice([None, 1e-4, 20.0])}
                with contextlib.suppress(RefusedError, DeadlineError):
                    future = engine.submit(request(number), priority=random.randrange(3), **limits)
                    if random.random() < 0.8:
                        assert future.result(10)[0][0] == 2 * number
                    else:
                        future.cancel()

        with ThreadPoolExecutor(6) as pool:
            for thread in [pool.submit(ask, 6 * seed + number) for number in range(6)]:
                thread.result(20)
        assert engine.run(request(3))[0][0] == 6
