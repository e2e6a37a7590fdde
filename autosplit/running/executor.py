"""Executor: takes requests in at the door, feeds the first rings, drains the last ones, and answers in order.

One thread of the host blocks on everything that can happen: a result on a ring, the death of a worker, a deadline at the
door, the end. A request is fed by whoever makes room for it: the caller if the window has room, else that thread once an
older request is done.
"""

import contextlib
import heapq
import itertools
import math
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from autosplit.errors import AutosplitError, DeadlineError, RefusedError, StageError, WorkerError
from autosplit.running.copying import Copies
from autosplit.running.inbox import Inbox
from autosplit.running.messages import Run
from autosplit.running.provisioner import Deployment, host_channels
from autosplit.running.recovery import Recovery
from autosplit.running.request import Request, RequestTimes, Tensors
from autosplit.running.ring import DATA, ERROR, FLAG, RingEnd, Slot


@dataclass(slots=True)
class Drain:
    """The host's end of a ring that brings results: its values by name and the number of its next request."""

    end: RingEnd
    copies: dict[str, Copies]
    first: int
    every: int
    next: int
    inbox: Inbox | None
    """What takes results as they come, where they need not keep their order."""

    def rewind(self, base: int) -> None:
        """Expect the first request of this ring from number ``base`` on."""
        self.next = base + (self.first - base) % self.every
        if self.inbox is not None:
            self.inbox.restart()

    def take(self) -> tuple[int, Slot] | None:
        """A request with its slot, if one is here."""
        if self.inbox is not None:
            found = self.inbox.pick()
            return (found[0], found[1][0]) if found else None
        try:
            slot = self.end.acquire(self.next, timeout_s=0)
        except TimeoutError:
            return None
        self.next += self.every
        return self.next - self.every, slot


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
        self._lock = threading.Condition()
        self._door: list[tuple[int, int, Request]] = []
        self._arrivals = itertools.count()
        self._window: dict[int, Request] = {}
        self._base = 0
        self._next = 0
        self._broken: AutosplitError | None = None
        self._open = True
        self._ending = False
        self._feeding = True
        self._alarm_ns: float = math.inf
        """No deadline at the door passes before."""
        wiring = deployment.wiring
        feeds, drains = host_channels(wiring)
        self._feeds = [
            ([RingEnd(ring, sends=True) for ring in deployment.rings[number]], wiring.channels[number].source_index)
            for number in feeds
        ]
        self._drains: dict[int, Drain] = {}
        for number in drains:
            channel = wiring.channels[number]
            for first, ring in enumerate(deployment.rings[number]):
                end = RingEnd(ring, sends=False)
                copies = {spec.name: Copies(spec, 4 * wiring.window) for spec in channel.specs}
                inbox = None if wiring.in_order else Inbox([[end]], deployment.words)
                self._drains[end.fd] = Drain(end, copies, first, channel.every, first, inbox)
        self._num_tokens = len(drains)
        self._passed = [(name, wiring.inputs.index(name)) for name in wiring.outputs if name in wiring.inputs]
        self._kept_inputs = [
            Copies(wiring.input_specs[name], room) if name in wiring.input_specs and name not in wiring.outputs else None
            for name in wiring.inputs
        ]
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poll = select.poll()
        for fd in (*self._drains, self._wake_fd, *(worker.pidfd for worker in deployment.workers)):
            self._poll.register(fd, select.POLLIN)
        self._recovery = Recovery(deployment, max_restarts)
        for worker in deployment.workers:
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
    def next_sequence(self) -> int:
        """The number of the request that will be fed next."""
        return self._next

    @property
    def num_answered(self) -> int:
        """Requests that were let in and have their answer, and so have all before them."""
        return self._base

    @property
    def num_waiting(self) -> int:
        """Requests at the door."""
        return len(self._door)

    @property
    def num_running(self) -> int:
        """Requests between the first stage and their answer."""
        return self._next - self._base

    def submit(self, request: Request, priority: int, timeout_s: float | None, *, keep: bool = False) -> "Future[Tensors]":
        """Take a request in.

        Args:
            request: the request; its inputs were checked.
            priority: lower is sooner, then arrival counts.
            timeout_s: how long to wait for room at the door; 0 refuses at once, None waits.
            keep: the caller leaves the inputs as they are until the answer, and answers for the room they take.
        Raises: RefusedError: no room in time, or closed. WorkerError: the pipeline has given up.
        """
        with self._lock:
            if not keep and not self._lock.wait_for(self._has_room, timeout_s):
                raise RefusedError(
                    f"the request was refused: {self.num_running} requests are running (limit {self.deployment.wiring.window}) "
                    f"and {len(self._door)} are waiting (limit {self.room}). Submit with a longer timeout_s, or less often."
                )
            if not self._open:
                raise RefusedError("the request was refused: the pipeline is closed")
            if self._broken is not None:
                raise type(self._broken)(str(self._broken))
            request.future.add_done_callback(lambda future: self._cancel(request) if future.cancelled() else None)
            heapq.heappush(self._door, (priority, next(self._arrivals), request))
            late = self._admit()
            if not keep and request.sequence < 0:
                # The caller may write into its tensors once submit returns.
                request.inputs = tuple(
                    copies.copy(value) if copies else value.clone()
                    for copies, value in zip(self._kept_inputs, request.inputs, strict=True)
                )
            if request.sequence < 0 and 0 < request.deadline_ns < self._alarm_ns:
                self._alarm_ns = request.deadline_ns
                os.eventfd_write(self._wake_fd, 1)
        self._answer(late)
        return request.future

    def at_next_request(self, action: Callable[[int, int], None]) -> None:
        """Call ``action`` with the numbers of the oldest request without an answer and of the next one; none is fed meanwhile."""
        with self._lock:
            action(self._base, self._next)

    def close(self, *, drain: bool) -> None:
        """Refuse new requests; wait for those taken in if ``drain``, else fail them; end the thread."""
        with self._lock:
            self._open = False
            self._lock.notify_all()
            if drain:
                self._lock.wait_for(lambda: self._broken is not None or not (self._door or self._window))
        self._ending = True
        with contextlib.suppress(OSError):
            os.eventfd_write(self._wake_fd, 1)
        self._thread.join()
        self._fail(RefusedError("the pipeline was closed before the request was done"))
        if self._wake_fd >= 0:
            os.close(self._wake_fd)
            self._wake_fd = -1

    def _has_room(self) -> bool:
        return len(self._door) < self.room or self._window_has_room() or not self._open or self._broken is not None

    def _window_has_room(self) -> bool:
        return self._feeding and self._next - self._base < self.deployment.wiring.window

    def _admit(self) -> list[Request]:
        """Feed waiting requests while the window has room (the lock is held); return those past their deadline."""
        late = []
        while self._door and self._window_has_room():
            priority, _, request = heapq.heappop(self._door)
            if request.late():
                late.append(request)
            elif not request.future.cancelled():
                self._feed(request, priority)
        return late

    def _expire(self) -> None:
        """Answer the requests whose deadline passed while they waited at the door."""
        with self._lock:
            late = [request for _, _, request in self._door if request.late()]
            self._leave(late)
            waiting = (request.deadline_ns for _, _, request in self._door)
            self._alarm_ns = min((deadline_ns for deadline_ns in waiting if deadline_ns), default=math.inf)
        self._answer(late)

    def _leave(self, leaving: Sequence[Request]) -> None:
        """Take requests away from the door (the lock is held)."""
        if leaving:
            self._door = [entry for entry in self._door if entry[2] not in leaving]
            heapq.heapify(self._door)
            self._lock.notify_all()

    def _feed(self, request: Request, priority: int) -> None:
        request.sequence = sequence = self._next
        request.fed_ns = time.monotonic_ns()
        request.tokens = self._num_tokens
        request.values = {name: request.inputs[position].clone() for name, position in self._passed}
        self.deployment.words.set_deadline(sequence, request.deadline_ns)
        self.deployment.words.set_priority(sequence, priority)
        self._window[sequence] = request
        self._next += 1
        for ends, index in self._feeds:
            end = ends[sequence % len(ends)]
            end.acquire(sequence, timeout_s=60.0).write(sequence, [request.inputs[position] for position in index])
            end.release()
        request.inputs = ()

    def _live(self) -> None:
        """The thread: block, then drain results or see to the dead."""
        try:
            while True:
                fds = {fd for fd, _ in self._poll.poll(self._patience_ms())}
                if self._ending:
                    return
                if self._wake_fd in fds:
                    os.eventfd_read(self._wake_fd)
                    fds.remove(self._wake_fd)
                if self._alarm_ns <= time.monotonic_ns():
                    self._expire()
                for fd in fds & self._drains.keys():
                    drain = self._drains[fd]
                    while (found := drain.take()) is not None:
                        self._receive(drain, *found)
                        if self._in_order:
                            break
                self._recovery.kill_hanging(self._next)
                if not fds <= self._drains.keys():
                    with self.deployment.control_lock:
                        self._recover()
        except AutosplitError as failure:
            self._fail(failure)
        except BaseException as failure:
            self._fail(WorkerError(f"the executor stopped: {failure!r}"))

    def _patience_ms(self) -> int | None:
        """How long nothing may happen before hanging workers and deadlines at the door are looked for; None for ever."""
        patience_s = min(self._recovery.look_s, max(0.0, self._alarm_ns - time.monotonic_ns()) / 1e9)
        return None if math.isinf(patience_s) else math.ceil(patience_s * 1000)

    def _receive(self, drain: Drain, sequence: int, slot: Slot) -> None:
        """Read one token of a ring, and answer what is done with it."""
        request = self._window[sequence]
        flag = slot.header[FLAG]
        if flag == DATA:
            for (name, copies), value in zip(drain.copies.items(), slot.tensors, strict=True):
                request.values[name] = copies.copy(value)
        elif request.error is None:
            request.error = _error(flag, slot.read_text().decode(errors="replace"), sequence)
        drain.end.release()
        request.tokens -= 1
        if request.tokens == 0:
            self._done(request)

    def _done(self, request: Request) -> None:
        if not isinstance(request.error, WorkerError):
            self._recovery.progressed()
        with self._lock:
            answers = [] if self._in_order else [request]
            while self._base in self._window and self._window[self._base].tokens == 0:
                oldest = self._window.pop(self._base)
                self._base += 1
                if self._in_order:
                    answers.append(oldest)
            answers += self._admit()
            self._lock.notify_all()
        self._answer(answers)

    def _answer(self, requests: Sequence[Request]) -> None:
        for request in requests:
            if request.answered:
                continue
            request.answered = True
            self.times.append(RequestTimes(request.sequence, request.submitted_ns, request.fed_ns, time.monotonic_ns()))
            if not request.future.set_running_or_notify_cancel():
                continue
            if request.error is not None:
                request.future.set_exception(request.error)
            else:
                request.future.set_result(tuple(request.values[name] for name in self.deployment.wiring.outputs))

    def _recover(self) -> None:
        """Replace the dead, and run again what was in flight."""
        with self._lock:
            self._feeding = False
        for worker in self.deployment.workers:
            with contextlib.suppress(KeyError, OSError):
                self._poll.unregister(worker.pidfd)
        suspects = self._recovery.replace_dead(self._base)
        for sequence, error in suspects.items():
            if sequence in self._window:
                self._window[sequence].error = error
                self.deployment.words.skip(sequence)
        with self._lock:
            for request in self._window.values():
                request.tokens = self._num_tokens
            for drain in self._drains.values():
                drain.rewind(self._base)
            self._recovery.resume(self._base, self._next)
            self._feeding = True
            late = self._admit()
        self._answer(late)
        for worker in self.deployment.workers:
            self._poll.register(worker.pidfd, select.POLLIN)

    def _cancel(self, request: Request) -> None:
        with self._lock:
            if request.sequence in self._window:
                self.deployment.words.skip(request.sequence)
            else:
                self._leave([request])

    def _fail(self, error: AutosplitError) -> None:
        """Answer every request with ``error``, and each that comes later."""
        with self._lock:
            self._broken = self._broken or error
            requests = [*self._window.values(), *(request for _, _, request in self._door)]
            self._window.clear()
            self._door.clear()
            self._lock.notify_all()
        for request in requests:
            request.error = request.error or type(error)(str(error))
        self._answer(requests)


def _error(flag: int, text: str, sequence: int) -> AutosplitError:
    if flag == ERROR:
        return StageError(text)
    return DeadlineError(f"request {sequence} was skipped: its deadline passed before the last stage")
