"""Pace: how many requests to have in flight, and how many answers to wait for at once, by how fast they come.

Waking the host for an answer takes it longer than all that it does with it, and takes a core from the stages. So of requests
that come fast, and that nobody waits for one by one, several are taken together, while as many others keep the stages busy::

    in flight  0 1 2 3 4 5 6 7      the host wakes when 3 is done, takes 0 1 2 3, feeds 8 9 10 11
"""

from collections.abc import Sequence

from autosplit.running.request import RequestTimes

SOON_NS = 20_000_000
"""How much later an answer that nobody waits for alone may be taken for that."""

_LOOKS_BACK = 32
"""Answers that tell how fast they come."""


class Pace:
    """Starts with each answer by itself.

    Args:
        least: requests in flight at most, as long as they come slowly.
        most: as many as there is room for.

    Attributes:
        size: requests in flight at most, for now.
        num_soon: answers that come within ``SOON_NS``, at most half of those in flight.
    """

    def __init__(self, least: int, most: int) -> None:
        self._least, self._most = least, most
        self.size = least
        self.num_soon = 1

    def look(self, times: Sequence[RequestTimes]) -> None:
        """See how fast answers come now; the newest is the last."""
        if len(times) >= _LOOKS_BACK:
            period_ns = max(1, times[-1].done_ns - times[-_LOOKS_BACK].done_ns) / _LOOKS_BACK
            self.num_soon = max(1, min(int(SOON_NS / period_ns), self._most // 2))
            self.size = max(self._least, min(2 * self.num_soon, self._most))
