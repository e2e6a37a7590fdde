"""Lanes: the numbers of requests, from which their replicas follow.

Request ``k`` runs on replica ``k mod r`` of a stage with ``r`` replicas. If all stages have the same number of replicas,
replica ``i`` of one stage hands over to replica ``i`` of the next and to no other. The replicas then form lanes that never
meet, and each lane counts by itself. The next request goes to the lane with the fewest requests under way, so no lane waits
for a slower one::

    two lanes, the second half as fast:   lane 0 runs 0 2 4 6 8 10   while lane 1 runs 1 3 5

In other pipelines there is one lane, and requests are numbered by arrival.
"""

from autosplit.running.request import Request
from autosplit.running.wiring import Wiring


class Lanes:
    """Numbers of the oldest and the next request of each lane. The executor holds its lock around each call.

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
        """The request to be fed next in the lane of a request or replica."""
        return self.nexts[number % self.num]

    def take(self) -> int:
        """Number a request that is fed now, in the lane with the fewest requests under way."""
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
