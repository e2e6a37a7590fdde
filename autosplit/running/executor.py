"""Executor: runs requests through a deployment, with one thread that waits for everything that can happen.

::

    submit -> Admission -> InputRings -> stages -> ResultRings -> InFlight -> Answers
              (queue)

The caller feeds its request if the window has room; otherwise the thread feeds it once another request ends. The thread
waits for results, the death of a worker, a deadline in the queue, and the end.
"""

import functools
import math
import threading
import time
from collections.abc import Callable

from autosplit.devices.processes import MOST_WAIT_S
from autosplit.errors import AutosplitError, RefusedError, WorkerError
from autosplit.running.admission import Admission
from autosplit.running.answers import Answering, Answers
from autosplit.running.feed import Occupancy
from autosplit.running.hostrings import InputRings, ResultRings
from autosplit.running.inflight import SOON_NS, InFlight
from autosplit.running.lanes import Lanes
from autosplit.running.provisioner import Deployment
from autosplit.running.recovery import Recovery
from autosplit.running.request import AnswerFuture, Request, RequestTimes

LOOK_NS = 1_000_000
"""How long results may keep the thread from looking at workers, deadlines and the end."""


class Executor(Answering):
    """Runs requests through a deployment.

    Args:
        deployment: rings and loaded workers.
        room: requests that may wait in the admission queue while the window is full.
        max_restarts: restarts of one worker without progress after which the pipeline gives up.

    Attributes:
        lanes: the numbers of the requests in flight.
        pace: how many requests are in flight and are taken together, for now.
    """

    def __init__(self, deployment: Deployment, *, room: int, max_restarts: int) -> None:
        self._thread = threading.Thread(target=self._run, name="autosplit-executor", daemon=True)
        self._in_flight = InFlight(deployment.wiring, deployment.status_block)
        self.lanes, self.pace = self._in_flight.lanes, self._in_flight.pace
        self._results = ResultRings(deployment)
        inputs = InputRings(deployment, room)
        self._answers = Answers(deployment.wiring.outputs, [self._thread])
        self._admission = Admission(self._in_flight, inputs, room, self._results.wake, self._answers.check_thread)
        self._recovery = Recovery(deployment, max_restarts)
        self._control_lock = deployment.control_lock
        self._stopping = deployment.stopping
        deployment.run(self.lanes)
        self._thread.start()

    @property
    def restarts(self) -> int:
        """Workers that were started anew so far."""
        return self._recovery.restarts

    @property
    def failure(self) -> AutosplitError | None:
        """Why the pipeline has given up or was closed, if it has."""
        return self._admission.failure

    def occupancy(self) -> Occupancy:
        """How many requests are here."""
        in_flight, queue = self._in_flight, self._admission.queue
        return Occupancy(
            num_waiting=queue.num_waiting,
            room=self._admission.room,
            num_held=queue.num_borrowed,
            num_running=in_flight.num_running,
            window=in_flight.pace.size,
            num_answered=in_flight.num_answered,
        )

    def submit(self, request: Request, priority: int, timeout_s: float | None) -> AnswerFuture:
        """``enter``, and the future of the answer."""
        future = request.future = AnswerFuture(functools.partial(self._admission.cancel, request))
        self.enter(request, priority, timeout_s)
        return future

    def enter(self, request: Request, priority: int = 0, timeout_s: float | None = None) -> None:
        """Take a request in: see ``Admission.enter``."""
        self._answers.check_process()
        if self._admission.enter(request, priority, timeout_s):
            self._answers.deliver([request])

    def prompt(self) -> bool:
        """Whether there is room for a request."""
        return self._admission.is_free()

    def hand_over(self, switch: Callable[[int], None]) -> None:
        """Refuse new requests from now on, and call ``switch`` with the number of requests that were taken in until now."""
        with self._admission.changed:
            self._admission.close(drain=False)
            switch(self._in_flight.num_fed + self._admission.queue.num_all)

    def count_from(self, number: int) -> None:
        """Number the requests from ``number`` on; none was taken in yet."""
        self._in_flight.num_fed = number

    def take_times(self, *, clear: bool) -> list[RequestTimes]:
        """The times of the last requests; with ``clear``, each comes once."""
        with self._admission.changed:  # held while the pace looks at them
            return self._answers.take_times(clear=clear)

    def finish(self) -> None:
        """Wait until an executor that has given up has answered all its requests."""
        self._thread.join()

    def close(self, *, drain: bool) -> None:
        """Refuse new requests; wait for those taken in if ``drain``, else fail them; end the thread."""
        try:
            self._admission.close(drain=drain)
        finally:  # also after an interrupt: the caller takes the workers and the rings away next
            self._stopping.set()
            self._results.wake()
            self._thread.join()
            self._fail(RefusedError("the pipeline was closed before the request was done"))
            self._results.close()

    def _run(self) -> None:
        """The thread: take results, wait while there are none, expire late requests, replace dead workers."""
        look_ns = 0
        try:
            while True:
                while self._take_results() and time.monotonic_ns() < look_ns:
                    pass
                worker_ended = self._wait()
                look_ns = time.monotonic_ns() + LOOK_NS
                if self._stopping.is_set():
                    return
                if self._admission.alarm_ns <= time.monotonic_ns():
                    self._answers.deliver(self._admission.pop_expired())
                self._recovery.kill_hanging(self.lanes.nexts)
                if worker_ended:
                    self._answers.deliver(self._recover())
        except AutosplitError as failure:
            self._fail(failure)
        except BaseException as failure:
            self._fail(WorkerError(f"the executor stopped: {failure!r}"))

    def _wait(self) -> bool:
        """Wait for results, or until it is time to look for hanging workers and late requests; True if a worker ended."""
        patience_s = min(self._recovery.look_s, max(0.0, self._admission.alarm_ns - time.monotonic_ns()) / 1e9)
        num_results = self._admission.num_to_await()
        if num_results > 1:
            patience_s = min(patience_s, SOON_NS / 1e9)
        patience_ms = None if math.isinf(patience_s) else math.ceil(min(patience_s, MOST_WAIT_S) * 1000)
        worker_ended = self._results.wait(patience_ms, num_results, self.lanes)
        self._admission.awake()
        return worker_ended

    def _take_results(self) -> bool:
        """Take all results that are here, and answer the requests that are done; whether there was any."""
        found, due = self._collect()
        self._answers.deliver(due)
        return found

    def _collect(self) -> tuple[bool, list[Request]]:
        """Take all results that are here; whether there was any, and the requests to be answered now."""
        found = False
        done = []
        for ring in self._results:
            for sequence, slot in ring.take():
                found = True
                request = self._in_flight[sequence]
                ring.read(slot, request)
                if request.tokens == 0:
                    done.append(request)
        return found, self._admission.settle(done, self._answers.times) if done else []

    def _recover(self) -> list[Request]:
        """Replace dead workers, and run again the requests in flight without a result; return those to be answered now."""
        with self._control_lock:
            self._admission.suspend()
            self._results.forget_workers()
            given_up = self._recovery.replace_dead(self.lanes)
            due = self._collect()[1]
            for sequence, error in given_up.items():
                self._in_flight.skip(sequence, error)
            due += self._admission.resume(self._restart)
            self._results.watch_workers()
        return due

    def _restart(self, lanes: Lanes) -> None:
        self._results.rewind(lanes)
        self._recovery.resume(lanes)

    def _fail(self, error: AutosplitError) -> None:
        """Answer every request with ``error``, and each that comes later."""
        self._answers.fail(self._admission.fail(error), error)
