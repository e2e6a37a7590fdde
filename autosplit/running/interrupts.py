"""SafeCondition and SafeFuture: a condition and a future of which Ctrl-C at any moment leaves no lock held.

A ``threading.Condition`` enters its lock in Python code. Ctrl-C between two instructions of that code leaves the lock held, and
the next thread that needs it waits for ever. A signal is handled only between instructions of Python code, so a lock that is
entered by C code is either entered or free.
"""

import threading
from concurrent.futures import Future
from typing import Any, TypeVar

_T = TypeVar("_T")


class SafeCondition(threading.Condition):
    """A condition with a lock of its own. The slots hold the methods of the lock, so ``with`` calls them without Python code."""

    __slots__ = ("__enter__", "__exit__")

    def __init__(self) -> None:
        lock = threading.RLock()
        super().__init__(lock)
        self.__enter__: Any = lock.__enter__
        self.__exit__: Any = lock.__exit__

    def beside(self) -> threading.Condition:
        """Another condition of the same lock, for callers that wait for something else."""
        return threading.Condition(self.__enter__.__self__)


class SafeFuture(Future[_T]):
    """A future with such a condition. It sets what ``Future`` sets by itself, as a condition takes 1 us to make."""

    def __init__(self) -> None:
        self._condition = SafeCondition()
        self._state = "PENDING"
        self._result = self._exception = None
        self._waiters: list[Any] = []
        self._done_callbacks: list[Any] = []
