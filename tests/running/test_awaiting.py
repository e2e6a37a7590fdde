"""Awaited requests: results, errors and cancellation in event loops, and few wake-ups of the loop."""

import asyncio
import contextlib
import functools
import gc
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from random import Random
from typing import Any

import pytest
from pipelines import double, local, request

from autosplit.errors import DeadlineError, RefusedError
from autosplit.running.awaiting import Awaiting
from autosplit.running.pipeline import InProcess, Pipeline

pytestmark = pytest.mark.timeout(60)


class Server:
    """Futures that the test answers; without room it refuses at once, or takes in once there is ``space``."""

    def __init__(self, room: bool = True) -> None:
        self.futures: list[Future[Any]] = []
        self.room = room
        self.num_at_the_door = 0
        self.space = threading.Event()
        self.space.set()
        self.left_s: list[float | None] = []

    def submit(self, timeout_s: float | None = None, deadline_s: float | None = None) -> "Future[Any]":
        if not self.room and timeout_s == 0:
            raise RefusedError("no room")
        if not self.room:
            self.num_at_the_door += 1
            self.space.wait(10)
        self.left_s.append(deadline_s)
        self.futures.append(Future())
        return self.futures[-1]


def test_answers_that_come_together_wake_the_loop_once(monkeypatch: pytest.MonkeyPatch) -> None:
    server, awaiting = Server(), Awaiting()

    async def run() -> list[Any]:
        loop, calls = asyncio.get_running_loop(), []
        call = loop.call_soon_threadsafe
        monkeypatch.setattr(loop, "call_soon_threadsafe", lambda *args: calls.append(args) or call(*args))
        waits = [asyncio.ensure_future(awaiting(server.submit, returns_immediately=True)) for _ in range(5)]
        await asyncio.sleep(0)
        for number, future in enumerate(server.futures):
            future.set_result(number)
        assert len(calls) == 1
        return await asyncio.gather(*waits)

    for _ in range(2):  # a second loop
        assert asyncio.run(run()) == [0, 1, 2, 3, 4]
        server.futures.clear()


@pytest.mark.parametrize("immediately", [True, False])
def test_a_request_without_room_is_submitted_in_another_thread_and_errors_arrive(immediately: bool) -> None:
    server, awaiting = Server(room=False), Awaiting()

    async def run() -> Any:
        wait = asyncio.ensure_future(awaiting(server.submit, returns_immediately=immediately))
        while not server.futures:
            await asyncio.sleep(1e-3)
        server.futures[0].set_exception(ValueError("wrong"))
        return await wait

    with pytest.raises(ValueError, match="wrong"):
        asyncio.run(run())


def test_a_wait_that_is_cancelled_cancels_the_request() -> None:
    server, awaiting = Server(), Awaiting()

    async def run() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(awaiting(server.submit, returns_immediately=True), 0.01)

    asyncio.run(run())
    assert server.futures[0].cancelled()


def test_requests_that_wait_for_room_leave_the_threads_of_the_loop_to_others() -> None:
    server, awaiting = Server(room=False), Awaiting()
    server.space.clear()

    async def run() -> list[Any]:
        waits = [asyncio.ensure_future(awaiting(server.submit, returns_immediately=True)) for _ in range(40)]
        await asyncio.sleep(0.01)
        assert await asyncio.wait_for(asyncio.to_thread(lambda: "read"), 5) == "read" and not server.futures
        server.space.set()
        while len(server.futures) < len(waits):
            await asyncio.sleep(1e-3)
        for number, future in enumerate(server.futures):
            future.set_result(number)
        return await asyncio.gather(*waits)

    assert asyncio.run(run()) == list(range(40))


def test_limits_of_time_count_from_the_call_on_and_behind_others_too() -> None:
    server, awaiting = Server(room=False), Awaiting()
    server.space.clear()

    async def run() -> None:
        first = asyncio.ensure_future(awaiting(server.submit, returns_immediately=True, deadline_s=10.0))
        await asyncio.sleep(0.05)
        with pytest.raises(RefusedError, match=r"still wait for room after 0\.05 s"):
            await awaiting(server.submit, returns_immediately=True, timeout_s=0.05)
        with pytest.raises(RefusedError, match="no room"):
            await awaiting(server.submit, returns_immediately=True, timeout_s=0)
        server.space.set()
        while not server.futures:
            await asyncio.sleep(1e-3)
        server.futures[0].set_result(1)
        assert await first == 1

    asyncio.run(run())
    assert len(server.futures) == 1 and server.left_s[0] is not None and server.left_s[0] < 10


def test_nobody_is_told_of_a_refusal_that_nobody_waits_for(caplog: pytest.LogCaptureFixture) -> None:
    awaiting, refuses = Awaiting(), threading.Event()

    def refuse(timeout_s: float | None, deadline_s: float | None) -> "Future[Any]":
        refuses.wait(10)
        raise RefusedError("closed")

    async def run() -> None:
        wait = asyncio.ensure_future(awaiting(refuse, returns_immediately=False))
        await asyncio.sleep(0.05)
        wait.cancel()
        await asyncio.wait([wait])
        refuses.set()
        with pytest.raises(RefusedError, match="closed"):
            await awaiting(refuse, returns_immediately=False)  # behind the first one in the thread

    asyncio.run(run())
    gc.collect()
    assert not caplog.records


def test_what_is_cancelled_while_it_waits_for_room_is_not_computed() -> None:
    server, awaiting = Server(room=False), Awaiting()
    server.space.clear()

    async def run() -> None:
        waits = [asyncio.ensure_future(awaiting(server.submit, returns_immediately=True)) for _ in range(3)]
        while not server.num_at_the_door:  # the first one is under way, and the others wait behind it
            await asyncio.sleep(1e-3)
        for wait in waits[:2]:
            wait.cancel()
        await asyncio.wait(waits[:2])
        server.space.set()
        while len(server.futures) < 2:
            await asyncio.sleep(1e-3)
        server.futures[1].set_result("third")
        assert await waits[2] == "third"

    asyncio.run(run())
    assert server.futures[0].cancelled() and len(server.futures) == 2


def test_other_tasks_run_between_answers_that_are_there_at_once() -> None:
    awaiting, done, seen = Awaiting(), Future[int](), []
    done.set_result(1)

    async def busy() -> None:
        for _ in range(3):
            await awaiting(lambda timeout_s, deadline_s: done, returns_immediately=True)
        seen.append("busy")

    async def other() -> None:
        await asyncio.sleep(0)
        seen.append("other")

    async def run() -> None:
        await asyncio.gather(busy(), other())

    asyncio.run(run())
    assert seen == ["other", "busy"]


@pytest.mark.parametrize(("make", "replicas"), [(Pipeline, 1), (InProcess, 1), (InProcess, 2)])
def test_nothing_is_left_after_a_storm_of_limits_and_cancellations_in_two_loops(make: Callable[..., Any], replicas: int) -> None:
    answers: list[float] = []
    with make([local("a", double, "x", "y", replicas=replicas)], ["x"], ["y"], queue_capacity=2) as engine:
        awaiting = Awaiting()

        async def ask(number: int, random: Random) -> None:
            submit = functools.partial(engine.submit, request(number))
            limits = {"timeout_s": random.choice([None, 0, 1e-3]), "deadline_s": random.choice([None, 1e-3, 10.0])}
            with contextlib.suppress(RefusedError, DeadlineError):
                answer = await awaiting(submit, returns_immediately=engine.returns_immediately, **limits)
                assert answer[0][0] == 2 * number
                answers.append(number)

        async def storm(seed: int) -> None:
            random = Random(seed)
            tasks = [asyncio.ensure_future(ask(number, random)) for number in range(100)]
            for _ in range(20):
                await asyncio.sleep(1e-3)
                random.choice(tasks).cancel()
            for failure in await asyncio.gather(*tasks, return_exceptions=True):
                assert failure is None or isinstance(failure, asyncio.CancelledError)

        with ThreadPoolExecutor(2) as pool:
            for loop in [pool.submit(asyncio.run, storm(seed)) for seed in range(2)]:
                loop.result(30)
        assert answers and engine.run(request(3))[0][0] == 6
        assert engine.occupancy.num_waiting == engine.occupancy.num_running == 0
