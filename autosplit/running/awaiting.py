"""Awaiting: await requests in event loops; answers that come together wake their loop once.

Waking an event loop takes a write to a pipe and a wake-up of its thread, which is more than a small model takes to compute.
"""

import asyncio
import contextlib
import functools
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from autosplit.errors import RefusedError


class Awaiting:
    """Awaits requests of one service, in any number of event loops."""

    def __init__(self) -> None:
        self._here = threading.local()

    async def __call__(self, submit: "Callable[..., Future[Any]]", *, prompt: bool) -> Any:
        """Submit a request and await its result. A wait that is cancelled cancels the request.

        Args:
            submit: takes ``timeout_s`` and returns the future.
            prompt: whether it returns soon if it need not wait; otherwise it is called in another thread.
        Raises: what ``submit`` raises, or the error of the request.
        """
        future: Future[Any] | None = None
        if prompt:
            with contextlib.suppress(RefusedError):  # no room by now, or closed: the other thread waits for it, or tells it
                future = submit(timeout_s=0)
        if future is None:
            future = await asyncio.to_thread(submit)
        if future.done():
            await asyncio.sleep(0)  # else a task that only asks for such answers would keep all others waiting
            return future.result()
        loop = asyncio.get_running_loop()
        arrivals: _Arrivals | None = getattr(self._here, "arrivals", None)
        if arrivals is None or arrivals.loop is not loop:
            arrivals = self._here.arrivals = _Arrivals(loop)
        waiter = loop.create_future()
        future.add_done_callback(functools.partial(arrivals.put, waiter))
        try:
            await waiter
        except asyncio.CancelledError:
            future.cancel()
            raise
        return future.result()


class _Arrivals:
    """The futures that are done and whose tasks in one event loop have not been woken."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._waiters: deque[asyncio.Future[None]] = deque()
        self._called = False

    def put(self, waiter: "asyncio.Future[None]", _: object = None) -> None:
        """Wake the task that waits, from any thread."""
        self._waiters.append(waiter)
        if not self._called:  # else the loop has yet to look
            self._called = True
            try:
                self.loop.call_soon_threadsafe(self._wake)
            except RuntimeError:  # the loop was closed, and nobody waits there
                self._waiters.clear()

    def _wake(self) -> None:
        self._called = False  # first: what is put from here on calls again
        while self._waiters:
            waiter = self._waiters.popleft()
            if not waiter.done():
                waiter.set_result(None)
