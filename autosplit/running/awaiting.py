"""Awaiting: await requests in event loops; answers that come together wake their loop once.

Waking an event loop takes a write to a pipe and a wake-up of its thread, which is more than a small model takes to compute.
"""

import asyncio
import functools
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from autosplit.errors import RefusedError


class Awaiting:
    """Awaits requests of one pipeline, in any number of event loops."""

    def __init__(self) -> None:
        self._here = threading.local()

    async def __call__(
        self,
        submit: "Callable[..., Future[Any]]",
        *,
        returns_immediately: bool,
        timeout_s: float | None = None,
        deadline_s: float | None = None,
    ) -> Any:
        """Submit a request and await its result. A wait that is cancelled cancels the request.

        Args:
            submit: takes ``timeout_s`` and ``deadline_s`` and returns the future.
            returns_immediately: whether it returns soon if it need not wait; otherwise it is called in another thread.
            timeout_s: seconds to wait for room; None waits without limit.
            deadline_s: seconds after which no stage begins the request; None for no limit.
        Raises: the errors of ``submit``, or that of the request.
        """
        begun_s = time.monotonic()
        future: Future[Any] | None = None
        if returns_immediately:
            try:
                future = submit(timeout_s=0, deadline_s=deadline_s)
            except RefusedError:  # no room by now, or closed: the other thread waits for room, or raises the refusal
                if timeout_s == 0:
                    raise
        loop = self._loop()
        if future is None:

            def wait_for_room() -> "Future[Any]":
                past_s = time.monotonic() - begun_s
                return submit(timeout_s=_left(timeout_s, past_s), deadline_s=_left(deadline_s, past_s))

            future = await loop.in_thread(wait_for_room, timeout_s)
        if future.done():
            await asyncio.sleep(0)  # else a task that only asks for such answers would keep all others waiting
            return future.result()
        waiter = loop.loop.create_future()
        future.add_done_callback(functools.partial(loop.wake, waiter))
        try:
            await waiter
        except asyncio.CancelledError:
            future.cancel()
            raise
        return future.result()

    def _loop(self) -> "_Loop":
        """The state of the event loop of this thread, made at its first use."""
        running = asyncio.get_running_loop()
        found: _Loop | None = getattr(self._here, "loop", None)
        if found is None or found.loop is not running:
            found = self._here.loop = _Loop(running)
        return found


class _Loop:
    """An event loop, the futures that are done and whose tasks have not been woken, and the thread that waits for room.

    One thread is enough, because requests wait for room in the order in which they came. It is not one of the loop's own few
    threads: while requests waited there, name look-ups and reads of files had to wait too.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._waiters: deque[asyncio.Future[None]] = deque()
        self._called = False
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="autosplit-awaiting")
        self._num_in_thread = 0

    async def in_thread(self, submit: "Callable[[], Future[Any]]", timeout_s: float | None) -> "Future[Any]":
        """The request that ``submit`` returns in the other thread; if the wait for it is cancelled, so is the request.

        Raises: RefusedError: its turn has not come within ``timeout_s``; the errors of ``submit``.
        """
        submitted = self._thread.submit(submit)
        here = asyncio.wrap_future(submitted)
        is_next = self._num_in_thread == 0
        self._num_in_thread += 1
        try:
            await asyncio.wait([here], timeout=None if is_next else timeout_s)
            if not here.done() and submitted.cancel():
                raise RefusedError(
                    f"the request was refused: requests that came before it still wait for room after {timeout_s:g} s. "
                    "Submit with a longer timeout_s, or less often."
                )
            return await here
        except asyncio.CancelledError:
            here.cancel()
            submitted.add_done_callback(_cancel_request)
            raise
        finally:
            self._num_in_thread -= 1

    def wake(self, waiter: "asyncio.Future[None]", _: object = None) -> None:
        """Wake the task that waits, from any thread."""
        self._waiters.append(waiter)
        if not self._called:  # else the loop has yet to look
            self._called = True
            try:
                self.loop.call_soon_threadsafe(self._wake)
            except RuntimeError:  # the loop was closed, and no task waits there
                self._waiters.clear()

    def _wake(self) -> None:
        self._called = False  # first: later futures call the loop again
        while self._waiters:
            waiter = self._waiters.popleft()
            if not waiter.done():
                waiter.set_result(None)


def _cancel_request(submitted: "Future[Future[Any]]") -> None:
    if not submitted.cancelled() and submitted.exception() is None:
        submitted.result().cancel()


def _left(limit_s: float | None, past_s: float) -> float | None:
    """The seconds that are left of a limit, at least a nanosecond."""
    return None if limit_s is None else max(1e-9, limit_s - past_s)
