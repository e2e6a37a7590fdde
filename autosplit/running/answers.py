"""Give answers to callers, and keep the times of the last requests."""

import logging
import os
import threading
from collections import deque
from collections.abc import Sequence
from copy import copy
from typing import Any

from autosplit.errors import AutosplitError, RefusedError, UsageError
from autosplit.running.request import Request, RequestTimes, Tensors

NUM_TIMES = 16_384

log = logging.getLogger(__name__)


class Answers:
    """The answers of one pipeline.

    Args:
        outputs: names of the pipeline's outputs, in the order of an answer.

    Attributes:
        threads: identifiers of the threads that deliver answers; no callback may end them.
        times: the times of the last ``NUM_TIMES`` requests.
        owner: the process that gives the answers.
    """

    def __init__(self, outputs: Sequence[str]) -> None:
        self.times: deque[RequestTimes] = deque(maxlen=NUM_TIMES)
        self._outputs = outputs
        self.threads: set[int | None] = set()
        self.owner = os.getpid()

    def deliver(self, requests: Sequence[Request]) -> None:
        """Answer requests; those that have an answer already are left out.

        Raises: in the thread of a caller, with which a callback ended it, once all requests are answered.
        """
        ended: BaseException | None = None
        for request in requests:
            if request.answered:
                continue
            self.times.append(request.times())
            request.answered = True
            if request.waiter is not None:
                request.wake()
            future, request.future = request.future, None  # without a reference cycle the answer's memory is free at once
            if future is None or not future.set_running_or_notify_cancel():
                continue
            try:
                try:
                    result = self.result(request)
                except Exception as failure:
                    future.set_exception(failure)
                else:
                    future.set_result(result)
            except BaseException as failure:  # a callback raised SystemExit, for example; a future catches every Exception
                if threading.get_ident() in self.threads:
                    log.exception("a callback of request %d ended its thread, which goes on with others", request.number)
                else:
                    ended = failure
        if ended is not None:
            raise ended

    def fail(self, requests: Sequence[Request], error: AutosplitError) -> None:
        """Answer requests with an error, each with one of its own, unless they have one already."""
        for request in requests:
            request.error = request.error or copy(error)
        self.deliver(requests)

    def result(self, request: Request) -> Any:
        """The outputs of an answered request, or what it returns in their place. Raises: the error with which it failed."""
        if request.error is not None:
            raise request.error
        values = request.values
        outputs = tuple([values[name] for name in self._outputs])
        return outputs if request.returns is None else request.returns(outputs)

    def wait_for(self, request: Request) -> Tensors:
        """The outputs of a request, once it is answered. Raises: as ``check_thread``; the error of the request."""
        if not request.answered:
            self.check_thread()
            request.wait()
        outputs: Tensors = self.result(request)
        return outputs

    def check_thread(self) -> None:
        """Raise an error in a thread that must not wait for an answer.

        Raises: UsageError: this is a callback, for the end of which other requests wait. RefusedError: as ``check_process``.
        """
        self.check_process()
        if threading.get_ident() in self.threads:
            raise UsageError("a callback of an answer cannot wait for the same pipeline, nor close it; do that in another thread")

    def check_process(self) -> None:
        """Raises: RefusedError: this process was forked from the one that gives the answers, which never come here."""
        if os.getpid() != self.owner:
            raise RefusedError(f"the request was refused: process {self.owner} opened the pipeline. Open one after the fork.")

    def take_times(self, *, clear: bool) -> list[RequestTimes]:
        """The times of the last requests; with ``clear``, each comes once."""
        return [self.times.popleft() for _ in range(len(self.times))] if clear else list(self.times)
