"""LocalExecutor: runs requests through copies of one stage in the caller's own process.

With one copy of the stage, the thread that calls ``enter`` computes the answer itself, so a request costs what the runtime
alone takes. A thread that comes while another one computes leaves its request in the queue and waits; the thread that computes
goes on with what waits, the most urgent first, and then passes its turn on. So a request of many threads costs one wake-up.
With several copies, each has a thread on the cores of its device, and the threads take requests from one queue::

    one copy:        enter -> queue -> the thread of a caller, whose turn it is -> answer
    several copies:  enter -> queue -> a thread of each copy -> answer
"""

import functools
import logging
import os
import threading

from autosplit.devices.limits import refusals_named
from autosplit.errors import AutosplitError, PlanError, RefusedError
from autosplit.running.admission import AdmissionQueue, closed, no_room, wait_until
from autosplit.running.answers import Answering, Answers
from autosplit.running.copying import CopyPool
from autosplit.running.entrance import Entrance
from autosplit.running.feed import FixedPace, Occupancy
from autosplit.running.request import AnswerFuture, Finished, Request, RequestTimes
from autosplit.running.stagecopy import StageCopy
from autosplit.running.wiring import Wiring

PROMPT_NS = 1_000_000
"""A stage that takes at most this long may be computed in the thread of an event loop."""

log = logging.getLogger(__name__)


class LocalExecutor(Answering):
    """Runs requests through the only stage of a network. It does what ``Executor`` does for workers.

    Args:
        wiring: the network.
        room: requests that may wait in the queue while every copy computes.

    Attributes:
        lock: held around each change.
        copies: the loaded copies of the stage.
        pace: one request for each copy.
    Raises: BackendError: the stage could not be loaded.
    """

    def __init__(self, wiring: Wiring, room: int) -> None:
        self.failure: AutosplitError | None = None
        self._wiring, self._room, self._is_open = wiring, room, True
        self._num_done = self._num_fed = 0
        self._in_turn = False
        """With one copy: whether a thread has the turn, which is to compute what it brought and what waits."""
        self._queue = AdmissionQueue()
        self.lock = threading.RLock()  # Ctrl-C in ``Condition.wait`` frees a Lock that another thread holds
        self._work, self._changed = threading.Condition(self.lock), threading.Condition(self.lock)
        specs = wiring.input_specs
        self._pools = [CopyPool(specs[name], room + 1) if name in specs else None for name in wiring.inputs]
        count = len(wiring.stages[0].devices)
        self.pace = FixedPace(count)
        self.copies: list[StageCopy] = [StageCopy(wiring, 0)] if count == 1 else []
        numbers = range(count if count > 1 else 0)
        self._threads = [threading.Thread(target=self._serve_copy, args=(number,), daemon=True) for number in numbers]
        self._answers = Answers(wiring.outputs, self._threads)
        self._entrance = Entrance(threading.Condition(self.lock), self._has_room, self._answers.check_thread)
        self._load()

    def submit(self, request: Request, priority: int, timeout_s: float | None) -> AnswerFuture:
        """``enter``, and the future of the answer; with one copy the answer is there when this returns."""
        if self._threads:
            request.future = future = AnswerFuture(functools.partial(self._cancel, request))
            self.enter(request, priority, timeout_s)
            return future
        self.enter(request, priority, timeout_s)
        try:
            return Finished(request.number, self._answers.result(request), None)
        except Exception as failure:
            return Finished(request.number, None, failure)

    def enter(self, request: Request, priority: int = 0, timeout_s: float | None = None) -> None:
        """Take a request in; with one copy, compute it in this thread. Raises: RefusedError: closed, or no room in time."""
        self._answers.check_process()
        if self._threads:
            self._enter_queue(request, priority, timeout_s)
            return
        with self.lock:
            self._check_open()
            waits, self._in_turn = self._in_turn, True
            if waits or self._queue:
                request.will_wait()
                self._queue.push(request, priority)
                first = None if waits else self._take()
            else:
                self._begin(first := request)
        if first is None:
            self._await_turn(request, timeout_s)
        else:
            self._take_turn(first, request)

    def prompt(self) -> bool:
        """Whether ``submit`` would return soon: there is room, or the copy is idle and usually takes less than ``PROMPT_NS``."""
        return self._entrance.is_free() if self._threads else not self._in_turn and self.copies[0].usual_ns < PROMPT_NS

    def occupancy(self) -> Occupancy:
        """How many requests are here."""
        return Occupancy(
            num_waiting=self._queue.num_waiting,
            room=self._room,
            num_held=self._queue.num_borrowed,
            num_running=self._num_fed - self._num_done,
            window=self.pace.size,
            num_answered=self._num_done,
        )

    def take_times(self, *, clear: bool) -> list[RequestTimes]:
        """The times of the last requests; with ``clear``, each comes once."""
        with self.lock:
            return self._answers.take_times(clear=clear)

    def close(self, *, drain: bool) -> None:
        """Answer the requests that were taken in (``drain``) or fail them, then let go of the stage; called once."""
        early = RefusedError("the pipeline was closed before the request was done")
        with self.lock:
            self._is_open, self.failure = False, self.failure or early
            failed = [] if drain else self._queue.clear()
            self._work.notify_all()
            self._entrance.end()
            wait_until(lambda: not (self._queue or self._in_turn), self._changed, None, self._answers.check_thread)
        self._answers.fail(failed, early)
        for thread in self._threads:
            if thread.ident is not None:
                thread.join()
        for copy in self.copies:
            copy.unload()

    @refusals_named()
    def _load(self) -> None:
        """Start the threads and wait until each has loaded its copy."""
        try:
            for thread in self._threads:
                thread.start()
        except RuntimeError:  # the kernel refuses another thread
            self.close(drain=False)
            raise
        with self.lock:
            self._changed.wait_for(lambda: len(self.copies) == max(1, len(self._threads)) or self.failure is not None)
            failure = self.failure
        if failure is not None:
            self.close(drain=False)
            raise failure

    def _enter_queue(self, request: Request, priority: int, timeout_s: float | None) -> None:
        """Leave a request to the threads of the copies."""
        with self.lock:
            try:
                if not request.borrowed and not self._entrance.enter(timeout_s):
                    raise self._no_room()
                self._check_open()
                self._queue.push(request, priority)
            finally:  # after Ctrl-C, for example, no answer will call the next caller
                if not self._queue and self._num_fed == self._num_done:
                    self._entrance.call(1)
            if not request.borrowed:
                self._copy_inputs(request)
            self._work.notify()

    def _check_open(self) -> None:
        if not self._is_open:
            raise closed()

    def _copy_inputs(self, request: Request) -> None:
        """Copy the inputs of a request that has to wait: its caller may write into its tensors once submit returns."""
        pairs = zip(self._pools, request.inputs, strict=True)
        request.inputs = tuple([pool.copy(value) if pool is not None else value.clone() for pool, value in pairs])

    def _take_turn(self, request: Request, own: Request) -> None:
        """Compute a request that was begun, then the thread's ``own`` one and as many as wait then, and pass the turn on."""
        copy, num_more = self.copies[0], -1
        while True:
            goes_on = False
            try:
                try:
                    self._compute(copy, request)
                finally:
                    self._answers.deliver((request,))
                goes_on = True
            finally:
                with self.lock:
                    self._num_done += 1
                    num_more = self._queue.num_all if num_more < 0 else num_more - 1
                    if goes_on and self._queue and (num_more > 0 or not own.answered):
                        request = self._take()
                    else:
                        self._in_turn = goes_on = False
                        self._call_next()
            if not goes_on:
                return

    def _call_next(self) -> None:
        """Wake the thread of the most urgent request that waits, so that it takes the turn (the lock is held)."""
        if self._queue:
            self._queue.first.wake()
        elif not self._is_open:
            self._changed.notify_all()

    def _await_turn(self, request: Request, timeout_s: float | None) -> None:
        """Wait until another thread has computed a request, or until this thread is called to take the turn."""
        try:
            while not request.answered:
                in_time = request.wait(timeout_s)
                with self.lock:
                    if not in_time and self._queue.remove([request]):
                        raise self._no_room()
                    timeout_s = timeout_s if in_time else None  # it is being computed
                    if request.answered or self._in_turn:
                        continue
                    self._in_turn, taken = True, self._take()
                self._take_turn(taken, request)
        except BaseException:  # Ctrl-C, for example
            with self.lock:
                self._queue.remove([request])
                if not self._in_turn:
                    self._call_next()
            raise

    def _serve_copy(self, number: int) -> None:
        """A thread: load a copy on the cores of its device, then take requests from the queue until the end."""
        try:
            cores = self._wiring.stages[0].devices[number].cores
            if cores:
                os.sched_setaffinity(0, cores)
            copy = StageCopy(self._wiring, number)
        except (AutosplitError, OSError) as failure:
            with self.lock:
                self.failure = failure if isinstance(failure, AutosplitError) else PlanError(str(failure))
                self._changed.notify_all()
            return
        with self.lock:
            self.copies.append(copy)
            self._changed.notify_all()
        while True:
            with self.lock:
                while not self._queue:
                    if not self._is_open:
                        return
                    self._work.wait()
                taken = self._take()
            self._serve(copy, taken)

    def _take(self) -> Request:
        """Begin the most urgent request (the lock is held)."""
        taken, _ = self._queue.pop()
        self._begin(taken)
        self._entrance.call_at_half(self._queue.num_waiting, self._room)
        return taken

    def _begin(self, request: Request) -> None:
        request.feed(self._num_fed, self._num_fed)
        self._num_fed += 1

    def _serve(self, copy: StageCopy, request: Request) -> None:
        """Compute and answer a request in the thread of its copy."""
        try:
            self._compute(copy, request)
        except BaseException:  # SystemExit in the stage, for example
            log.exception("request %d ended the thread of its copy, which goes on with others", request.number)
        with self.lock:
            self._num_done += 1
            self._entrance.call_at_half(self._queue.num_waiting, self._room)
            if not self._is_open:
                self._changed.notify_all()
        self._answers.deliver((request,))

    def _compute(self, copy: StageCopy, request: Request) -> None:
        """Compute a request, unless it was cancelled. Raises: what ended the stage; the request has an error then."""
        try:
            if request.future is None or not request.future.cancelled():
                copy.serve(request)
        except BaseException:  # Ctrl-C in the thread of one caller, and another one may wait for this request
            request.error = RefusedError("the thread that computed the request was interrupted; submit it again")
            raise

    def _cancel(self, request: Request, future: AnswerFuture) -> None:
        """Take a cancelled request out of the queue."""
        with self.lock:
            if self._queue.remove([request]):
                future.set_running_or_notify_cancel()
                self._entrance.call(1)
                self._changed.notify_all()

    def _has_room(self) -> bool:
        waiting = self._queue.num_waiting
        return waiting < self._room or self._num_fed - self._num_done + waiting < self.pace.size

    def _no_room(self) -> RefusedError:
        return no_room(self._num_fed - self._num_done, self.pace.size, self._queue.num_waiting, self._room)
