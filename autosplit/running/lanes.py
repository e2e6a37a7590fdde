"""Lanes: the numbers of requests, from which their replicas follow, and who gets the next one.

Request ``k`` runs on replica ``k mod r`` of a stage with ``r`` replicas. Where all stages have equally many, replica ``i`` of one
hands over to replica ``i`` of the next and to no other, so the replicas form lanes that never meet, and each lane may count by
itself. The next request goes to the lane with the fewest under way, and no lane waits for a slower one::

    two lanes, the second one half as fast:   0 2 4 6 8 10      and meanwhile   1 3 5

Elsewhere there is one lane, and the numbers are those of arrival.
"""

from autosplit.running.request import Request
from autosplit.running.wiring import Wiring


class Lanes:
    """Not for several threads at once: the executor holds its lock around each call.

    Attributes:
        bases: of each lane, the number of its oldest request that is not done.
        nexts: of each lane, the number of the request that it gets next.
    """

    def __init__(self, wiring: Wiring) -> None:
        self.num = wiring.num_lanes
        self.bases = list(range(self.num))
        self.nexts = list(range(self.num))
        self._last = -1

    def base(self, number: int) -> int:
        """The oldest request that is not done, in the lane of a request, or of a replica."""
        return self.bases[number % self.num]

    def next(self, number: int) -> int:
        """The request to be fed next, in the lane of a request, or of a replica."""
        return self.nexts[number % self.num]

    def take(self) -> int:
        """The number of a request that is fed now."""
        turns = [(self._last + turn) % self.num for turn in range(1, self.num + 1)]
        self._last = lane = min(turns, key=lambda one: self.nexts[one] - self.bases[one])
        self.nexts[lane] += self.num
        return self.nexts[lane] - self.num

    def settle(self, window: dict[int, Request]) -> None:
        """Take the requests that are done, and all before them in their lane, out of the window."""
        for lane, base in enumerate(self.bases):
            while (oldest := window.get(base)) is not None and oldest.tokens == 0:
                del window[base]
                base += self.num
            self.bases[lane] = base
