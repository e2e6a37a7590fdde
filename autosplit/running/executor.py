"""Executor: takes requests in at the door, feeds the first rings, drains the last ones, and answers in order.

One thread of the host blocks on everything that can happen: a result on a ring, the death of a worker, a deadline at the door,
the end. A request is fed by whoever makes room for it: the caller if the window has room, else that thread once one ends.
"""

import contextlib
import functools
import logging
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from autosplit.devices.processes import MOST_WAIT_S
from autosplit.errors import AutosplitError, RefusedError, UsageError, WorkerError
from autosplit.running.door import Door
from autosplit.running.draining import Drains, error_of
from autosplit.running.feeding import Feeds
from autosplit.running.lanes import Lanes
from autosplit.running.messages import Run
from autosplit.running.pacing import SOON_NS, Pace
from autosplit.running.provisioner import Deployment
from autosplit.running.recovery import Recovery
from autosplit.running.request import Answer, Request, RequestTimes, Tensors
from autosplit.running.ring import DATA, FLAG, POSTED_NS

log = logging.getLogger(__name__)

LOOK_NS = 1_000_000
"""How long results may keep the thread from looking at workers, deadlines and the end."""


class Executor:
    """Runs requests through a deployment.

    Args:
        deployment: rings and loaded workers.
        room: requests that may wait at the door while the window is full.
        max_restarts: restarts in a row, without a request done in between, after which the pipeline gives up.
    """

    def __init__(self, deployment: Deployment, *, room: int, max_restarts: int = 3) -> None:
        self.deployment = deployment
        self.times: deque[RequestTimes] = deque(maxlen=16_384)
        self.room = room
        self._in_order = deployment.wiring.in_order
        self.pace = Pace(deployment.wiring.window, deployment.wiring.most_in_flight)
        self._hurried = -1
        """The last request in flight that somebody may wait for alone."""
        self._dozes = False
        """Whether the thread waits for more than the next result."""
        self._lock = threading.Condition()
        self._num_blocked = 0
        """Threads that wait for room, or for the end."""
        self._door = Door()
        self._window: dict[int, Request] = {}
        """By their numbers, what is not done, or comes after such a one in its lane."""
        self._unanswered: deque[Request] = deque()
        """In the order of admission, where answers keep it."""
        self.lanes = Lanes(deployment.wiring)
        self._num_fed = 0
        self._broken: AutosplitError | None = None
        self._open = True
        self._owner = os.getpid()
        self._ending = False
        self._feeding = True
        self._alarm_ns: float = math.inf
        """No deadline at the door passes before."""
        self._feeds = Feeds(deployment, room)
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._drains = Drains(deployment, [self._wake_fd, *(worker.pidfd for worker in deployment.workers)])
        self._recovery = Recovery(deployment, max_restarts)
        for worker in deployment.workers:
            with contextlib.suppress(OSError):  # one that died while others still loaded is found by its descriptor
                worker.connection.send(Run(0))
        self._thread = threading.Thread(target=self._live, name="autosplit-executor", daemon=True)
        self._thread.start()

    @property
    def restarts(self) -> int:
        """Workers that were started anew so far."""
        return self._recovery.restarts

    @property
    def failure(self) -> AutosplitError | None:
        """Why it has given up or was closed, if it has."""
        return self._broken

    @property
    def num_answered(self) -> int:
        """Requests that were let in and have their answer, and so have all before them."""
        return self._num_fed - self.num_running

    @property
    def num_waiting(self) -> int:
        """Requests that take room at the door."""
        return self._door.num_waiting

    @property
    def num_held(self) -> int:
        """Requests that wait beside them, in memory of their callers."""
        return self._door.num_held

    @property
    def num_running(self) -> int:
        """Requests between the first stage and their answer."""
        return len(self._unanswered) if self._in_order else self._num_fed - self.lanes.bases[0]

    def submit(self, request: Request, priority: int, timeout_s: float | None) -> Answer:
        """``enter``, and the future of the answer."""
        future = request.future = Answer(functools.partial(self._cancel, request))
        self.enter(request, priority, timeout_s)
        return future

    def enter(self, request: Request, priority: int = 0, timeout_s: float | None = None) -> None:
        """Take a request in.

        Args:
            request: the request; its inputs were checked.
            priority: lower is sooner, then arrival counts.
            timeout_s: how long to wait for room at the door; 0 refuses at once, None waits.
        Raises: RefusedError: no room in time, or closed. WorkerError: the pipeline has given up.
        """
        if os.getpid() != self._owner:
            raise RefusedError(f"the request was refused: process {self._owner} opened the pipeline. Open one after the fork.")
        with self._lock:
            if not request.keep and not self._has_room() and not self._wait_for(self._has_room, timeout_s):
                raise RefusedError(
                    f"the request was refused: {self.num_running} requests are running (limit {self.pace.size}) "
                    f"and {self.num_waiting} are waiting (limit {self.room}). Submit with a longer timeout_s, or less often."
                )
            if not self._open:
                raise RefusedError("the request was refused: the pipeline is closed")
            if self._broken is not None:
                raise type(self._broken)(str(self._broken))
            if self._window_has_room():  # then nobody is at the door
                late = self._let_in(request, priority)
            else:
                late = False
                self._door.push(request, priority)
                self._stay(request)
        if late:
            self._answer([request])

    def check_thread(self) -> None:
        """Raises: UsageError: this is a callback, for the end of which all requests wait, so it must wait for none."""
        if threading.current_thread() is self._thread:
            raise UsageError("a callback of an answer cannot wait for the same pipeline, nor close it; do that in another thread")

    def _stay(self, request: Request) -> None:
        """A request waits at the door: its inputs are made safe, and its deadline is watched (the lock is held)."""
        if not request.keep:
            self._feeds.keep(request)
        if 0 < request.deadline_ns < self._alarm_ns:
            self._alarm_ns = request.deadline_ns
            os.eventfd_write(self._wake_fd, 1)
        elif request.hurries and self._dozes:
            os.eventfd_write(self._wake_fd, 1)

    def at_next_request(self, action: Callable[[Lanes, int], None]) -> None:
        """Call ``action`` with what is not done and the number of requests that were fed; none is fed meanwhile."""
        with self._lock:
            action(self.lanes, self._num_fed)

    def take_times(self, *, clear: bool) -> list[RequestTimes]:
        """Those of the last requests; none is lost, and none comes twice, if they are cleared."""
        with self._lock:  # the pace, which looks at them, holds it
            return [self.times.popleft() for _ in range(len(self.times))] if clear else list(self.times)

    def close(self, *, drain: bool) -> None:
        """Refuse new requests; wait for those taken in if ``drain``, else fail them; end the thread."""
        try:
            with self._lock:
                self._open = False
                self._lock.notify_all()
                if drain:
                    self._wait_for(lambda: self._broken is not None or not (self._door or self._window), None)
        finally:  # also of who was interrupted: the caller takes the workers and the rings away next
            self._ending = True
            with contextlib.suppress(OSError):
                os.eventfd_write(self._wake_fd, 1)
            self._thread.join()
            self._fail(RefusedError("the pipeline was closed before the request was done"))
            if self._wake_fd >= 0:
                os.close(self._wake_fd)
                self._wake_fd = -1

    def _wait_for(self, condition: Callable[[], bool], timeout_s: float | None) -> bool:
        """Wait until the condition holds, which is looked at when a request is done (the lock is held)."""
        if timeout_s is None or timeout_s > 0:
            self.check_thread()
        self._num_blocked += 1
        try:
            return self._lock.wait_for(condition, None if timeout_s is None else min(timeout_s, threading.TIMEOUT_MAX))
        finally:
            self._num_blocked -= 1

    def _has_room(self) -> bool:
        return self.num_waiting < self.room or self._window_has_room() or not self._open or self._broken is not None

    def _window_has_room(self) -> bool:
        return self._feeding and self.num_running < self.pace.size

    def _admit(self) -> list[Request]:
        """Feed waiting requests while the window has room (the lock is held); return those past their deadline."""
        late = []
        while self._door and self._window_has_room():
            request, priority = self._door.pop()
            if self._let_in(request, priority):
                late.append(request)
        return late

    def _let_in(self, request: Request, priority: int) -> bool:
        """Feed a request, unless it was cancelled; True if its deadline has passed (the lock is held)."""
        if request.deadline_ns and request.late():
            return True
        if request.future is None or not request.future.cancelled():
            self._feed(request, priority)
        else:
            request.future.set_running_or_notify_cancel()
        return False

    def _expire(self) -> None:
        """Answer the requests whose deadline passed while they waited at the door."""
        with self._lock:
            late = self._door.late()
            self._alarm_ns = self._door.next_deadline_ns()
            self._lock.notify_all()
        self._answer(late)

    def _feed(self, request: Request, priority: int) -> None:
        request.sequence = sequence = self.lanes.take()
        request.number = self._num_fed
        request.fed_ns = time.monotonic_ns()
        request.tokens = self._drains.num_tokens
        self.deployment.words.describe(sequence, request.deadline_ns, priority, request.number)
        self._window[sequence] = request
        if self._in_order:
            self._unanswered.append(request)
        self._num_fed += 1
        if request.hurries:
            self._hurried = request.number
            if self._dozes:
                os.eventfd_write(self._wake_fd, 1)
        self._feeds.write(request)

    def _live(self) -> None:
        """The thread: drain results, block when there are none, see to the dead."""
        look_ns = 0
        try:
            while True:
                while self._receive() and time.monotonic_ns() < look_ns:
                    pass
                fds = self._wait()
                look_ns = time.monotonic_ns() + LOOK_NS
                if self._ending:
                    return
                if self._wake_fd in fds:
                    os.eventfd_read(self._wake_fd)
                    fds.remove(self._wake_fd)
                if self._alarm_ns <= time.monotonic_ns():
                    self._expire()
                self._recovery.kill_hanging(self.lanes.nexts)
                if fds:
                    with self.deployment.control_lock:
                        self._recover()
        except AutosplitError as failure:
            self._fail(failure)
        except BaseException as failure:
            self._fail(WorkerError(f"the executor stopped: {failure!r}"))

    def _wait(self) -> set[int]:
        """Wait for results, or until it is time to look for hanging workers and late requests; the other readable descriptors.

        Several results are waited for if they come fast and nobody waits for one of them alone.
        """
        patience_s = min(self._recovery.look_s, max(0.0, self._alarm_ns - time.monotonic_ns()) / 1e9)
        alone = self._hurried >= self.num_answered or self._door.num_waiting > 0
        self._dozes = self._in_order and self.pace.num_soon > 1 and self.num_running > 0 and not alone
        if self._dozes:
            patience_s = min(patience_s, SOON_NS / 1e9)
        patience_ms = None if math.isinf(patience_s) else math.ceil(min(patience_s, MOST_WAIT_S) * 1000)
        found = self._drains.wait(patience_ms, self.pace.num_soon if self._dozes else 1, self.lanes)
        self._dozes = False
        return found

    def _receive(self) -> bool:
        """Take all results that are here, and answer what is done with them; whether there was any."""
        found = False
        done = []
        for drain in self._drains:
            for sequence, slot in drain.take():
                found = True
                request = self._window[sequence]
                if slot.header[FLAG] == DATA:
                    for (name, copies), value in zip(drain.copies.items(), slot.tensors, strict=True):
                        request.values[name] = copies.copy(value)
                elif request.error is None:
                    request.error = error_of(slot, request.number)
                request.made_ns = max(request.made_ns, slot.header[POSTED_NS])
                drain.end.release(sequence)
                request.tokens -= 1
                if request.tokens == 0:
                    done.append(request)
        if done:
            self._settle(done)
        return found

    def _settle(self, done: list[Request]) -> None:
        """Answer requests, all tokens of which are here, or let them wait for older ones; feed what waits at the door."""
        if any(not isinstance(request.error, WorkerError) for request in done):
            self._recovery.progressed()
        with self._lock:
            self.lanes.settle(self._window)
            answers = [] if self._in_order else done
            while self._unanswered and self._unanswered[0].tokens == 0:
                answers.append(self._unanswered.popleft())
            self.pace.look(self.times)  # with the lock: room that it makes is for who waits at the door, not for who comes
            if self._door:
                answers += self._admit()
            if self._num_blocked:
                self._lock.notify_all()
        self._answer(answers)

    def _answer(self, requests: Sequence[Request]) -> None:
        for request in requests:
            if request.answered:
                continue
            self.times.append(request.times())
            request.answered = True
            if request.waiter is not None:
                request.waiter.release()
            future, request.future = request.future, None  # without a circle, memory is free once nobody holds the answer
            if future is None or not future.set_running_or_notify_cancel():
                continue
            try:
                if request.error is not None:
                    future.set_exception(request.error)
                else:
                    future.set_result(self.outputs(request))
            except BaseException:  # of a callback, sys.exit say: an Exception never comes out of a future
                if threading.current_thread() is not self._thread:
                    raise
                log.exception("a callback of request %d ended its thread, which goes on with the other requests", request.number)

    def outputs(self, request: Request) -> Tensors:
        """The answer to a request, which is due. Raises: what made it fail."""
        if request.error is not None:
            raise request.error
        values = request.values
        return tuple([values[name] for name in self.deployment.wiring.outputs])

    def _recover(self) -> None:
        """Replace the dead, and run again what was in flight."""
        with self._lock:
            self._feeding = False
        for worker in self.deployment.workers:
            with contextlib.suppress(KeyError, OSError):
                self._drains.forget(worker.pidfd)
        suspects = self._recovery.replace_dead(self.lanes)
        for sequence, error in suspects.items():
            if sequence in self._window:
                self._window[sequence].error = error
                self.deployment.words.skip(sequence)
        with self._lock:
            for request in self._window.values():
                request.tokens = self._drains.num_tokens
            for drain in self._drains:
                drain.rewind(self.lanes)
            self._recovery.resume(self.lanes)
            self._feeding = True
            late = self._admit()
            self._lock.notify_all()
        self._answer(late)
        for worker in self.deployment.workers:
            self._drains.watch(worker.pidfd)

    def _cancel(self, request: Request, future: Answer) -> None:
        with self._lock:
            if request.sequence in self._window:
                self.deployment.words.skip(request.sequence)
            elif self._door.remove([request]):
                future.set_running_or_notify_cancel()
                self._lock.notify_all()

    def _fail(self, error: AutosplitError) -> None:
        """Answer every request with ``error``, and each that comes later."""
        with self._lock:
            self._broken = self._broken or error
            requests = [*dict.fromkeys([*self._unanswered, *self._window.values()]), *self._door.clear()]
            self._unanswered.clear()
            self._window.clear()
            self._lock.notify_all()
        for request in requests:
            request.error = request.error or type(error)(str(error))
        self._answer(requests)
