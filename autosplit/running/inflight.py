"""The requests between the first stage and their answer: how many there may be, and their numbers in lanes of replicas.

Waking the host for one answer takes longer than all other work that the host does for it, and takes a core from the stages.
So where answers come fast, and no caller waits for one of them alone, several are taken together, while as many other
requests keep the stages busy::

    in flight  0 1 2 3 4 5 6 7      the host wakes when 3 is done, takes 0 1 2 3, feeds 8 9 10 11

Request ``k`` runs on replica ``k mod r`` of a stage with ``r`` replicas. If all stages have the same number of replicas,
replica ``i`` of one stage hands over to replica ``i`` of the next and to no other. The replicas then form lanes that never
meet, and each lane counts by itself. The next request goes to the lane with the fewest requests under way, so no lane waits
for a slower one::

    two lanes, the second half as fast:   lane 0 runs 0 2 4 6 8 10   while lane 1 runs 1 3 5

In other pipelines there is one lane, and requests are numbered by arrival.
"""

from collections.abc import Sequence

from autosplit.errors import WorkerError
from autosplit.memory.slots import HOST
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
        most: most requests that the rings hold; None for a pace that does not change, with answers that are taken one by one.

    Attributes:
        size: requests in flight at most, for now.
        batch_to_collect: answers that come within ``SOON_NS``, at most half of those in flight; 1 at first.
    """

    def __init__(self, least: int, most: int | None = None) -> None:
        self._least, self._most = least, most or least
        self.size = least
        self.batch_to_collect = 1

    def look(self, times: Sequence[RequestTimes]) -> None:
        """Take the rate from the times of the last answers, the newest last."""
        if len(times) >= _NUM_RECENT:
            period_ns = max(1, times[-1].done_ns - times[-_NUM_RECENT].done_ns) / _NUM_RECENT
            self.batch_to_collect = max(1, min(int(SOON_NS / period_ns), self._most // 2))
            self.size = max(self._least, min(2 * self.batch_to_collect, self._most))


class Lanes:
    """Numbers of the oldest and the next request of each lane. The admission's lock is held around each call.

    Attributes:
        bases: for each lane, the number of its oldest unfinished request.
        nexts: for each lane, the number of its next request.
    """

    def __init__(self, wiring: Wiring) -> None:
        self.num = wiring.num_lanes
        self.bases = list(range(self.num))
        self.nexts = list(range(self.num))
        self._last = -1

    @property
    def num_places(self) -> int:
        """Requests from the oldest unfinished one of each lane to its newest."""
        return (sum(self.nexts) - sum(self.bases)) // self.num

    def base(self, number: int) -> int:
        """The oldest unfinished request in the lane of a request or replica."""
        return self.bases[number % self.num]

    def next(self, number: int) -> int:
        """The request to be sent next in the lane of a request or replica."""
        return self.nexts[number % self.num]

    def take(self) -> int:
        """Number a request that is sent now, in the lane with the fewest requests under way."""
        turns = [(self._last + turn) % self.num for turn in range(1, self.num + 1)]
        self._last = min(turns, key=lambda one: self.nexts[one] - self.bases[one])
        self.nexts[self._last] += self.num
        return self.nexts[self._last] - self.num

    def settle(self, window: dict[int, Request]) -> None:
        """Take the oldest requests of each lane, as far as they are done, out of the window."""
        for lane, base in enumerate(self.bases):
            while (oldest := window.get(base)) is not None and oldest.tokens == 0:
                del window[base]
                base += self.num
            self.bases[lane] = base


class InFlight:
    """The requests in flight; the admission's lock is held around each change.

    A request is answered when its own results have arrived, also before older ones. Its place is free once it is the oldest of
    its lane. A restart takes away results and never places, and requests that have an answer are skipped when they run again.

    Attributes:
        lanes: the numbers of requests.
        pace: the most requests in flight, for now.
        num_with_waiter: requests in flight for whose answer alone a caller may wait.
    """

    def __init__(self, wiring: Wiring, status_block: StatusBlock) -> None:
        self.lanes = Lanes(wiring)
        self.pace = Pace(wiring.window, wiring.most_in_flight)
        self._status_block = status_block
        self.num_with_waiter = 0
        self._num_tokens = sum(channel.target == HOST for channel in wiring.channels)
        self._requests: dict[int, Request] = {}
        """By number: the requests that are not done, or that come after such a request in their lane."""

    def __getitem__(self, sequence: int) -> Request:
        return self._requests[sequence]

    def has_room(self) -> bool:
        """Whether one more request may be sent: there is a place, and so a slot in every ring from the host."""
        return self.lanes.num_places < self.pace.size

    def add(self, request: Request) -> None:
        """Number a request that is sent now in its lane, and write its deadline for the stages."""
        self.num_with_waiter += request.has_waiter  # first: the transport's thread looks at it without the lock
        request.sequence = sequence = self.lanes.take()
        request.lane, request.tokens = sequence % self.lanes.num, self._num_tokens
        self._status_block.describe(sequence, request.deadline_ns, request.number)
        self._requests[sequence] = request

    def settle(self, done: list[Request], times: Sequence[RequestTimes]) -> list[Request]:
        """Let go of finished requests; return those without an answer yet.

        Args:
            done: requests whose results are all here.
            times: the times of the last answers, for the pace.
        """
        self.lanes.settle(self._requests)
        due = [request for request in done if not request.answered]
        self.num_with_waiter -= sum(request.has_waiter for request in due)
        self.pace.look(times)
        return due

    def skip(self, sequence: int, error: WorkerError | None = None) -> None:
        """Let the stages skip a request without an answer, which then fails with ``error`` if there is one."""
        request = self._requests.get(sequence)
        if request is not None and not request.answered:
            request.error = error or request.error
            self._status_block.skip(sequence)

    def restart(self) -> None:
        """All requests in flight run again, so all their results are missing again; those with an answer are skipped."""
        for sequence, request in self._requests.items():
            request.tokens = self._num_tokens
            if request.answered:
                self._status_block.skip(sequence)

    def unanswered(self) -> list[Request]:
        """The requests without an answer, in the order of their numbers."""
        return [request for _, request in sorted(self._requests.items()) if not request.answered]

    def clear(self) -> list[Request]:
        """Forget all requests; return those without an answer."""
        found = self.unanswered()
        self._requests.clear()
        self.num_with_waiter = 0
        return found
