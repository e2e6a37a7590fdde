"""A condition and futures of which Ctrl-C and ``os.fork`` at any moment leave no lock held, by the private fields of a Future.

A ``threading.Condition`` enters its lock in Python code. Ctrl-C between two instructions of that code leaves the lock held, and
the next thread that needs it waits for ever. A signal is handled only between instructions of Python code, so a lock that is
entered by C code is either entered or free.

A forked process has one thread. Other threads held locks at that moment, and none of them will ever give an answer there. So
each future gets a new lock, and one without an answer fails.
"""

import os
import threading
import weakref
from concurrent.futures import Future
from typing import Any, TypeVar

from autosplit.errors import RefusedError

_T = TypeVar("_T")


class SafeCondition(threading.Condition):
    """A condition with a lock of its own. The slots hold the methods of the lock, so ``with`` calls them without Python code."""

    __slots__ = ("__enter__", "__exit__", "lock")

    def __init__(self) -> None:
        self.lock = lock = threading.RLock()
        super().__init__(lock)
        self.__enter__: Any = lock.__enter__
        self.__exit__: Any = lock.__exit__

    def beside(self) -> threading.Condition:
        """Another condition of the same lock, for callers that wait for something else."""
        return threading.Condition(self.lock)


class SafeFuture(Future[_T]):
    """A future with such a condition; in a forked process it has its result, or fails with RefusedError.

    It sets the fields that ``Future`` sets by itself, as a condition takes 1 us to make.
    """

    def __init__(self) -> None:
        _futures.add(self)
        self._condition = SafeCondition()
        self._state = "PENDING"
        self._result = self._exception = None
        self._waiters: list[Any] = []
        self._done_callbacks: list[Any] = []


class DoneFuture(SafeFuture[_T]):
    """A future that is done from the start. Nobody waits for it, so all share the fields that a future needs to be waited for."""

    _condition = SafeCondition()
    _state = "FINISHED"
    _waiters: list[Any] = []  # noqa: RUF012
    _done_callbacks: list[Any] = []  # noqa: RUF012

    def __init__(self, result: Any, error: Exception | None) -> None:
        self._result, self._exception = result, error

    def result(self, timeout: float | None = None) -> Any:
        """The result. Raises: the error."""
        if self._exception is not None:
            raise self._exception
        return self._result


_futures: "weakref.WeakSet[SafeFuture[Any]]" = weakref.WeakSet()


def _fail_in_child() -> None:
    """In a forked process: fail each future without an answer. Its callbacks are the parent's, and are not called here."""
    DoneFuture._condition = SafeCondition()
    for future in list(_futures):
        future._condition = SafeCondition()
        if future._state in ("PENDING", "RUNNING"):
            future._state, future._waiters, future._done_callbacks = "FINISHED", [], []
            future._exception = RefusedError(
                f"the request was submitted before the fork, and its answer goes to process {os.getppid()} alone. Wait for it "
                "there, or open a pipeline after the fork."
            )


os.register_at_fork(after_in_child=_fail_in_child)
