"""Awaited requests: results, errors and cancellation in event loops, and few wake-ups of the loop."""

import asyncio
from concurrent.futures import Future
from typing import Any

import pytest

from autosplit.errors import RefusedError
from autosplit.running.awaiting import Awaiting


class Server:
    """Futures that the test answers; without room it refuses at once or, without a limit on time, takes in after all."""

    def __init__(self, room: bool = True) -> None:
        self.futures: list[Future[Any]] = []
        self.room = room

    def submit(self, timeout_s: float | None = None) -> "Future[Any]":
        if not self.room and timeout_s is not None:
            raise RefusedError("no room")
        self.futures.append(Future())
        return self.futures[-1]


def test_answers_that_come_together_wake_the_loop_once(monkeypatch: pytest.MonkeyPatch) -> None:
    server, awaiting = Server(), Awaiting()

    async def run() -> list[Any]:
        loop, calls = asyncio.get_running_loop(), []
        call = loop.call_soon_threadsafe
        monkeypatch.setattr(loop, "call_soon_threadsafe", lambda *args: calls.append(args) or call(*args))
        waits = [asyncio.ensure_future(awaiting(server.submit, prompt=True)) for _ in range(5)]
        await asyncio.sleep(0)
        for number, future in enumerate(server.futures):
            future.set_result(number)
        assert len(calls) == 1
        return await asyncio.gather(*waits)

    for _ in range(2):  # a second loop
        assert asyncio.run(run()) == [0, 1, 2, 3, 4]
        server.futures.clear()


@pytest.mark.parametrize("prompt", [True, False])
def test_a_request_without_room_is_submitted_in_another_thread_and_errors_arrive(prompt: bool) -> None:
    server, awaiting = Server(room=False), Awaiting()

    async def run() -> Any:
        wait = asyncio.ensure_future(awaiting(server.submit, prompt=prompt))
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
            await asyncio.wait_for(awaiting(server.submit, prompt=True), 0.01)

    asyncio.run(run())
    assert server.futures[0].cancelled()


def test_other_tasks_run_between_answers_that_are_there_at_once() -> None:
    awaiting, done, seen = Awaiting(), Future[int](), []
    done.set_result(1)

    async def busy() -> None:
        for _ in range(3):
            await awaiting(lambda timeout_s: done, prompt=True)
        seen.append("busy")

    async def other() -> None:
        await asyncio.sleep(0)
        seen.append("other")

    async def run() -> None:
        await asyncio.gather(busy(), other())

    asyncio.run(run())
    assert seen == ["other", "busy"]
