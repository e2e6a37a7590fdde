"""Turns: callers compute their requests themselves, on the one copy of a stage in their process.

The thread that calls ``enter`` computes the answer, so a request costs the time of the runtime alone. A thread that comes while
another one computes leaves its request in the queue and waits. The thread that computes goes on with waiting requests, the most
urgent first, and then passes its turn on. So a request of many threads costs one wake-up.
"""

from autosplit.running.admission import Admission
from autosplit.running.localstage import LocalStage
from autosplit.running.request import Finished, Request

SHORT_NS = 1_000_000
"""A stage that takes at most this long may be computed in the thread of an event loop."""


class Turns(Admission):
    """Computes requests in the threads of their callers; its queue holds the requests of waiting threads.

    Attributes:
        stage: the copy of the stage; the transport loads it.
        is_taken: whether a thread has the turn, and computes its own request and waiting ones.
    """

    stage: LocalStage
    is_taken = False

    @property
    def returns_immediately(self) -> bool:
        """Whether ``submit`` would return soon: no thread computes, and the stage usually takes less than ``SHORT_NS``."""
        return not self.is_taken and self.stage.usual_ns < SHORT_NS

    def submit(self, request: Request, timeout_s: float | None) -> Finished:
        """Compute a request; the future has its answer."""
        self.enter(request, timeout_s)
        try:
            return Finished(request.number, self.answers.result(request), None)
        except Exception as failure:
            return Finished(request.number, None, failure)

    def enter(self, request: Request, timeout_s: float | None = None) -> None:
        """Compute a request in this thread, or wait until another thread has. Raises: RefusedError: closed, or not in time."""
        self.answers.check_process()
        with self.changed:
            self.check_open()
            waits, self.is_taken = self.is_taken, True
            if waits or self.queue:
                request.will_wait()
                self.queue.push(request)
                first = None if waits else self._pop()
            else:
                self.number(first := request)
        if first is None:
            self._await(request, timeout_s)
        else:
            self._take(first, request)

    def _take(self, request: Request, own: Request) -> None:
        """Compute a numbered request, then the thread's ``own`` one and as many as wait then, and pass the turn on."""
        num_more = -1
        while True:
            goes_on = False
            try:
                try:
                    self.stage.compute(request)
                finally:
                    self.answers.deliver((request,))
                goes_on = True
            finally:
                with self.changed:
                    self.num_running -= 1
                    num_more = self.queue.num_all if num_more < 0 else num_more - 1
                    if goes_on and self.queue and (num_more > 0 or not own.answered):
                        request = self._pop()
                    else:
                        self.is_taken = goes_on = False
                        self._wake_next()
            if not goes_on:
                return

    def _wake_next(self) -> None:
        """Wake the thread of the most urgent request that waits, so that it takes the turn (the lock is held)."""
        if self.queue:
            self.queue.first.wake()
        elif not self.is_open:
            self.changed.notify_all()

    def _await(self, request: Request, timeout_s: float | None) -> None:
        """Wait until another thread has computed a request, or until this thread is woken to take the turn."""
        try:
            while not request.answered:
                in_time = request.wait(timeout_s)
                with self.changed:
                    if not in_time and self.queue.remove([request]):
                        raise self.no_room()
                    timeout_s = timeout_s if in_time else None  # it is being computed
                    if request.answered or self.is_taken:
                        continue
                    self.is_taken, first = True, self._pop()
                self._take(first, request)
        except BaseException:  # Ctrl-C, for example
            with self.changed:
                self.queue.remove([request])
                if not self.is_taken:
                    self._wake_next()
            raise

    def _pop(self) -> Request:
        """Number the most urgent request, which is computed now (the lock is held)."""
        request = self.queue.pop()
        self.number(request)
        return request
