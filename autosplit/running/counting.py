"""Counts of how full batches are: a Batcher adds to them, health and metrics read them."""

import threading
from dataclasses import dataclass, field


@dataclass(eq=False)
class BatchCounts:
    """Batches sent so far, the rows of requests in them, and the rows that only fill them up."""

    num_batches: int = 0
    num_rows: int = 0
    num_padding: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, num_rows: int, num_padding: int) -> None:
        """One more batch."""
        with self._lock:
            self.num_batches += 1
            self.num_rows += num_rows
            self.num_padding += num_padding
