"""Ctrl-C at any moment leaves no lock of the engine held."""

import contextlib
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from autosplit.running.admission import Admission
from autosplit.running.request import AnswerFuture, Answers, Finished


def admission() -> Any:
    return Admission(None, Answers(()), 1).changed  # type: ignore[arg-type]


def future() -> Any:
    return AnswerFuture(lambda future: None)._condition


@pytest.mark.parametrize(
    "make", [admission, lambda: Finished(0, None, None)._condition, future], ids=["admission", "finished", "future"]
)
def test_a_lock_that_is_interrupted_while_it_is_entered_or_left_is_free(make: Callable[[], Any]) -> None:
    """Ctrl-C inside ``Condition.__enter__``, which is Python code, left the lock held, and ``close`` waited for ever."""
    lock = make()

    def enter_for_ever() -> None:
        while True:
            with lock:
                pass

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGVTALRM, interrupt)
    until_s = time.monotonic() + 0.3
    try:
        signal.setitimer(signal.ITIMER_VIRTUAL, 2e-4, 2e-4)
        while time.monotonic() < until_s:
            with contextlib.suppress(KeyboardInterrupt):
                enter_for_ever()
    except KeyboardInterrupt:
        pass
    finally:
        signal.signal(signal.SIGVTALRM, signal.SIG_IGN)
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
    taken = []

    def take() -> None:
        taken.append(lock.acquire(timeout=30))
        if taken == [True]:
            lock.release()  # finished futures share it, and other tests need it

    thread = threading.Thread(target=take)
    thread.start()
    thread.join()
    assert taken == [True]
