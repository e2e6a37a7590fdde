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

from autosplit.devices.calls import begin, serve
from autosplit.devices.processes import Worker, spawn_worker
from autosplit.errors import BackendError, HungError, RefusedError, WorkerError


class Counter:
    """The state of a worker."""

    number = 0

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
    thread = threading.Thread(target=serve, args=(theirs, Counter()))
    thread.start()
    yield SimpleNamespace(name="counting", connection=ours)
    ours.close()
    thread.join(10)
    assert not thread.is_alive()


@pytest.fixture
def process() -> Iterator[Worker]:
    with closing(spawn_worker("autosplit.devices.calls:serve", name="apart")) as worker:
        yield worker
        worker.kill()  # it may sleep, and ``close`` would wait for it


def sleep(_: object, seconds: float) -> None:
    time.sleep(seconds)


def crash(_: object) -> None:
    os.kill(os.getpid(), signal.SIGSEGV)


def test_calls_run_in_order_and_a_late_reply_is_not_taken_for_the_next(counting: Any) -> None:
    calls = [begin(counting, "while it counted", Counter.add, number, times=2) for number in range(3)]
    assert [call.result(10) for call in calls] == [0, 2, 6]
    begin(counting, "while it counted", Counter.add, 1)  # and nobody waits for the reply
    assert begin(counting, "while it counted", Counter.add, 1).result(10) == 8


def test_an_error_of_autosplit_comes_as_it_is_and_any_other_with_its_traceback(counting: Any) -> None:
    with pytest.raises(BackendError, match=r"^no kernel$") as refused:
        begin(counting, "while it refused", Counter.refuse).result(10)
    assert refused.value.refused == {"add": "no kernel"} and refused.value.backend == "openvino"
    for function, said in {Counter.fail: "ZeroDivisionError: one by none", Counter.answer_with_a_lock: "cannot pickle"}.items():
        with pytest.raises(WorkerError, match=rf"(?s)worker 'counting' failed while it worked\..*Traceback.*{said}"):
            begin(counting, "while it worked", function).result(10)
    assert begin(counting, "while it counted", Counter.add, 1).result(10) == 1


def test_a_call_that_hangs_ends_at_its_limit_or_at_a_stop_and_shows_its_seconds_before(process: Worker) -> None:
    seen: list[float] = []
    with pytest.raises(HungError, match=r"worker 'apart' gave no answer within 0\.5 s while it slept"):
        begin(process, "while it slept", sleep, 60.0).result(0.5, progress=seen.append)
    assert seen == sorted(seen) and seen[0] > 0 and seen[-1] < 0.5
    stop = threading.Event()
    stop.set()
    with pytest.raises(RefusedError, match="the pipeline was closed while it slept"):
        begin(process, "while it slept", sleep, 60.0).result(stop=stop)


def test_a_worker_that_dies_is_named_with_its_signal_also_by_later_calls(process: Worker) -> None:
    for _ in range(2):
        with pytest.raises(WorkerError, match="worker 'apart' was killed by SIGSEGV while it crashed") as died:
            begin(process, "while it crashed", crash).result(30)
        assert not isinstance(died.value, HungError)


def test_a_worker_without_calls_ends_after_its_limit() -> None:
    ours, theirs = Pipe()
    with ours, theirs:
        serve(theirs, idle_s=0.01)
