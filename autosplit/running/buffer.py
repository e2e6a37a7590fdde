"""Buffer: the inputs of one request as tensors to fill, so that a pipeline need not copy them."""

import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any

from autosplit.running.feed import Feed
from autosplit.running.request import AnswerFuture, Request, Tensors, spent


class Buffer:
    """The inputs of one request; ``Engine.buffer`` makes it.

    In a pipeline they lie in the ring from which the first stages read. Until ``submit``, or the end of the ``with`` block, no
    other request is fed, so fill them at once; answers come meanwhile. A buffer that nobody refers to any more is given up. ::

        with pipeline.buffer() as buffer:
            buffer.tensors[0].copy_(frame)
            future = buffer.submit()

    Attributes:
        tensors: one for each input, with the shape, dtype and strides that the pipeline was built for, and any contents. They
            must not be written to after ``submit``, nor once the buffer was given up.
    """

    tensors: Tensors = ()

    def __init__(self, feed: Feed, request: Request, priority: int) -> None:
        self._feed, self._request, self._priority, self._is_open = feed, request, priority, True
        self._once = threading.Lock()
        """Taken by the first thread that submits the buffer."""

    def submit(self, returns: Callable[[Tensors], Any] | None = None, *, in_place: bool = False) -> AnswerFuture:
        """Send the request with what the tensors hold; arguments as for ``Engine.submit``.

        Raises: UsageError: it was submitted or given up. RefusedError, WorkerError: the pipeline was closed, or has given up.
        """
        if not self._is_open or not self._once.acquire(blocking=False):
            raise spent()
        request = self._request
        request.inputs, request.returns, request.in_place = self.tensors, returns, in_place
        try:
            future = self._feed.fill(request, self._priority)
        except BaseException:  # refused, or Ctrl-C, for example: other requests wait for its turn
            self.close()
            raise
        self._is_open = False
        return future

    def close(self) -> None:
        """Give the buffer up, unless it was submitted."""
        if self._is_open:
            self._feed.leave(self._request)
            self._is_open = False

    def __del__(self) -> None:
        self.close()

    def __enter__(self) -> "Buffer":
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
