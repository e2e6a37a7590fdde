"""The requests between the first stage and their answer, and how many of them there may be.

Waking the host for one answer takes longer than all other work that the host does for it, and takes a core from the stages.
So where answers come fast, and no caller waits for one of them alone, several are taken together, while as many other
requests keep the stages busy::

    in flight  0 1 2 3 4 5 6 7      the host wakes when 3 is done, takes 0 1 2 3, feeds 8 9 10 11
"""

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

    A request is answered when its own results have arrived, also before older ones. Its place is free once it is the oldest of
    its lane. A restart takes away results and never places, and requests that have an answer are skipped when they run again.

    Attributes:
        lanes: the numbers of requests.
        pace: the most requests in flight, for now.
        num_fed: requests that were fed so far.
        num_running: requests that were fed and have no answer.
        num_awaited: requests in flight for whose answer alone a caller may wait.
    """

    def __init__(self, wiring: Wiring, status_block: StatusBlock) -> None:
        self.lanes = Lanes(wiring)
        self.pace = Pace(wiring.window, wiring.most_in_flight)
        self.num_fed = 0
        self._status_block = status_block
        self.num_running = self.num_awaited = 0
        self._num_tokens = sum(channel.target == HOST for channel in wiring.channels)
        self._requests: dict[int, Request] = {}
        """By number: the requests that are not done, or that come after such a request in their lane."""

    def __bool__(self) -> bool:
        return bool(self._requests)

    def __getitem__(self, sequence: int) -> Request:
        return self._requests[sequence]

    @property
    def num_answered(self) -> int:
        """Requests that were fed and have their answer."""
        return self.num_fed - self.num_running

    def has_room(self) -> bool:
        """Whether one more request may be fed: there is a place, and so a slot in every ring from the host."""
        return self.lanes.num_places < self.pace.size

    def add(self, request: Request) -> None:
        """Number a request that is fed now, and write its deadline for the stages."""
        sequence = self.lanes.take()
        request.feed(sequence, self.num_fed)
        request.tokens = self._num_tokens
        self._status_block.describe(sequence, request.deadline_ns, request.number)
        self._requests[sequence] = request
        self.num_fed += 1
        self.num_running += 1
        self.num_awaited += request.awaited

    def settle(self, done: list[Request], times: Sequence[RequestTimes]) -> list[Request]:
        """Let go of finished requests; return those without an answer yet.

        Args:
            done: requests whose results are all here.
            times: the times of the last answers, for the pace.
        """
        self.lanes.settle(self._requests)
        due = [request for request in done if not request.answered]
        self.num_running -= len(due)
        self.num_awaited -= sum(request.awaited for request in due)
        self.pace.look(times)
        return due

    def skip(self, sequence: int, error: WorkerError | None = None) -> bool:
        """Let the stages skip a request, which fails with ``error`` if there is one; False if it is not in flight."""
        request = self._requests.get(sequence)
        if request is None or request.answered:
            return False
        request.error = error or request.error
        self._status_block.skip(sequence)
        return True

    def restart(self) -> None:
        """All requests in flight run again, so all their results are missing again; those with an answer are skipped."""
        for sequence, request in self._requests.items():
            request.tokens = self._num_tokens
            if request.answered:
                self._status_block.skip(sequence)

    def clear(self) -> list[Request]:
        """Forget all requests; return those without an answer."""
        found = [request for request in self._requests.values() if not request.answered]
        self._requests.clear()
        self.num_running = self.num_awaited = 0
        return found
