"""Calls in a worker: every way in which one can end, in a process and in a thread in its place."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from multiprocessing import Pipe
from types import SimpleNamespace
from typing import Any

import pytest

from autosplit.devices.calls import answer, begin, serve
from autosplit.devices.processes import WorkerProcess, spawn_worker
from autosplit.errors import BackendError, HungError, RefusedError, WorkerError


class Counter:
    """The state of a worker."""

    def __init__(self) -> None:
        self.number = 0

    def add(self, more: int, times: int = 1) -> int:
        self.number += more * times
        return self.number

    def refuse(self) -> None:
        raise BackendError("no kernel", {"add": "no kernel"}, "openvino")

    def fail(self) -> None:
        raise ZeroDivisionError("one by none")

    def answer_with_a_lock(self) -> Any:
        return threading.Lock()


@pytest.fixture
def counting() -> Iterator[Any]:
    """A worker in a thread, which keeps a Counter."""
    ours, theirs = Pipe()
    thread = threading.Thread(target=serve, args=(theirs, Counter()), daemon=True)
    thread.start()
    worker = SimpleNamespace(name="counting", connection=ours, wait=lambda timeout_s: True, fate=lambda: "was ended")
    yield worker
    ours.close()
    thread.join(10)


@pytest.fixture
def process() -> Iterator[WorkerProcess]:
    with closing(spawn_worker("autosplit.devices.calls:serve", name="apart")) as worker:
        yield worker


def test_calls_run_in_order_and_each_has_its_own_result(counting: Any) -> None:
    calls = [begin(counting, "while it counted", Counter.add, number, times=2) for number in range(3)]
    assert [call.result(10) for call in calls] == [0, 2, 6]


def test_a_late_reply_is_not_taken_for_the_next(counting: Any) -> None:
    begin(counting, "while it counted", Counter.add, 1)  # and nobody waits for the reply
    assert begin(counting, "while it counted", Counter.add, 1).result(10) == 2


def test_an_error_of_autosplit_comes_as_it_is_and_any_other_with_its_traceback(counting: Any) -> None:
    with pytest.raises(BackendError, match=r"^no kernel$") as refused:
        begin(counting, "while it refused", Counter.refuse).result(10)
    assert refused.value.refused == {"add": "no kernel"} and refused.value.backend == "openvino"
    with pytest.raises(
        WorkerError, match=r"(?s)worker 'counting' failed while it failed\..*Traceback.*ZeroDivisionError: one by none"
    ):
        begin(counting, "while it failed", Counter.fail).result(10)
    with pytest.raises(WorkerError, match=r"(?s)failed while it answered\..*cannot pickle '_thread.lock' object"):
        begin(counting, "while it answered", Counter.answer_with_a_lock).result(10)
    assert begin(counting, "while it counted", Counter.add, 1).result(10) == 1


def test_a_call_that_hangs_ends_at_its_limit_and_shows_its_seconds_before(process: WorkerProcess) -> None:
    seen: list[float] = []
    with pytest.raises(HungError, match=r"worker 'apart' gave no answer within 0\.5 s while it slept"):
        begin(process, "while it slept", _sleep, 60.0).result(0.5, progress=seen.append)
    assert seen == sorted(seen) and seen[0] > 0 and seen[-1] < 0.5
    stop = threading.Event()
    stop.set()
    with pytest.raises(RefusedError, match="the pipeline was closed while it slept"):
        begin(process, "while it slept", _sleep, 60.0).result(stop=stop)


def test_a_worker_that_dies_is_named_with_its_signal_also_by_later_calls(process: WorkerProcess) -> None:
    for _ in range(2):
        with pytest.raises(WorkerError, match="worker 'apart' was killed by SIGSEGV while it crashed") as died:
            begin(process, "while it crashed", _crash).result(30)
        assert not isinstance(died.value, HungError)


def _sleep(_: object, seconds: float) -> None:
    time.sleep(seconds)


def _crash(_: object) -> None:
    os.kill(os.getpid(), signal.SIGSEGV)


def test_a_worker_without_calls_ends_after_its_limit() -> None:
    ours, theirs = Pipe()
    with ours, theirs:
        serve(theirs, idle_s=0.01)
        ours.close()
        with pytest.raises(EOFError):
            answer(theirs)
