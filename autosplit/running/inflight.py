"""The requests between the first stage and their answer, and how many of them there may be.

Waking the host for one answer takes longer than all other work that the host does for it, and takes a core from the stages.
So where answers come fast, and no caller waits for one of them alone, several are taken together, while as many other
requests keep the stages busy::

    in flight  0 1 2 3 4 5 6 7      the host wakes when 3 is done, takes 0 1 2 3, feeds 8 9 10 11
"""

from collections import deque
from collections.abc import Sequence

from autosplit.errors import WorkerError
from autosplit.memory.slots import HOST
from autosplit.running.lanes import Lanes
from autosplit.running.request import Request, RequestTimes
from autosplit.running.statusblock import StatusBlock
from autosplit.running.wiring import Wiring

SOON_NS = 20_000_000
"""How much later an answer may be taken because it is taken together with others."""

_NUM_RECENT = 32
"""Answers from which their rate is taken."""


class Pace:
    """How many requests may be in flight, and how many answers to wait for at once, by the rate of answers.

    Args:
        least: requests in flight at most, as long as answers come slowly.
        most: requests in flight for which there is room in the rings.

    Attributes:
        size: requests in flight at most, for now.
        num_soon: answers that come within ``SOON_NS``, at most half of those in flight; 1 at first.
    """

    def __init__(self, least: int, most: int) -> None:
        self._least, self._most = least, most
        self.size = least
        self.num_soon = 1

    def look(self, times: Sequence[RequestTimes]) -> None:
        """Take the rate from the times of the last answers, the newest last."""
        if len(times) >= _NUM_RECENT:
            period_ns = max(1, times[-1].done_ns - times[-_NUM_RECENT].done_ns) / _NUM_RECENT
            self.num_soon = max(1, min(int(SOON_NS / period_ns), self._most // 2))
            self.size = max(self._least, min(2 * self.num_soon, self._most))


class InFlight:
    """The requests in flight; the executor holds its lock around each call that changes them.

    Order: a request is answered when it is the first one of those without an answer, and only the executor's thread answers
    requests that were fed. A restart takes away results and never places, so that dying workers cannot change the order.

    Attributes:
        lanes: which numbers requests get.
        pace: how many requests there may be.
        num_fed: requests that were fed so far.
        in_order: whether answers keep the order of admission.
    """

    def __init__(self, wiring: Wiring, status_block: StatusBlock) -> None:
        self.lanes = Lanes(wiring)
        self.pace = Pace(wiring.window, wiring.most_in_flight)
        self.num_fed = 0
        self._status_block = status_block
        self.in_order = wiring.in_order
        self._num_tokens = sum(channel.target == HOST for channel in wiring.channels)
        self._requests: dict[int, Request] = {}
        """By number: the requests that are not done, or that come after such a request in their lane."""
        self._unanswered: deque[Request] = deque()
        """In the order of admission, where answers keep it."""

    def __bool__(self) -> bool:
        return bool(self._requests)

    def __getitem__(self, sequence: int) -> Request:
        return self._requests[sequence]

    @property
    def num_running(self) -> int:
        """Requests between the first stage and their answer."""
        return len(self._unanswered) if self.in_order else self.num_fed - self.lanes.bases[0]

    @property
    def num_answered(self) -> int:
        """Requests that were fed and have their answer, and so have all before them."""
        return self.num_fed - self.num_running

    def has_room(self) -> bool:
        """Whether one more request may be fed."""
        return self.num_running < self.pace.size

    def add(self, request: Request, priority: int) -> None:
        """Number a request that is fed now, and tell the stages its deadline and priority."""
        sequence = request.sequence if request.unfilled else self.lanes.peek()
        self.lanes.take(sequence)
        request.feed(sequence, self.num_fed)
        request.unfilled, request.tokens = False, self._num_tokens
        self._status_block.describe(sequence, request.deadline_ns, priority, request.number)
        self._requests[sequence] = request
        if self.in_order:
            self._unanswered.append(request)
        self.num_fed += 1

    def settle(self, done: list[Request], times: Sequence[RequestTimes]) -> list[Request]:
        """Let go of finished requests; return those whose answers are due now.

        Args:
            done: requests whose results are all here.
            times: the times of the last answers, for the pace.
        """
        self.lanes.settle(self._requests)
        due = [] if self.in_order else done
        while self._unanswered and self._unanswered[0].tokens == 0:
            due.append(self._unanswered.popleft())
        self.pace.look(times)
        return due

    def skip(self, sequence: int, error: WorkerError | None = None) -> bool:
        """Let the stages skip a request, which fails with ``error`` if there is one; False if it is not in flight."""
        request = self._requests.get(sequence)
        if request is not None:
            request.error = error or request.error
            self._status_block.skip(sequence)
        return request is not None

    def restart(self) -> None:
        """All requests in flight run again, so all their results are missing again."""
        for request in self._requests.values():
            request.tokens = self._num_tokens
            if request.lent is not None:  # no caller has this answer yet, and it comes again in the same slot
                request.lent()

    def clear(self) -> list[Request]:
        """Forget all requests; return them."""
        found = list(dict.fromkeys([*self._unanswered, *self._requests.values()]))
        self._unanswered.clear()
        self._requests.clear()
        return found
