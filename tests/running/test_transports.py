"""The contract of a transport, for workers joined by rings and for copies in the caller's process."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from contract import ROOM, TransportContract
from pipelines import at_widths, local

from autosplit.running.engine import Engine
from autosplit.running.inprocess import InProcess
from autosplit.running.pipeline import Pipeline

pytestmark = pytest.mark.timeout(60)


class TestRings(TransportContract):
    """Workers joined by rings."""

    def open(self, function: Callable[..., Any], replicas: int = 1, widths: Sequence[int] = ()) -> Engine:
        """Two requests in flight for each worker."""
        stage = at_widths(local("a", function, "x", "y", replicas), *widths)
        return Pipeline([stage], ["x"], ["y"], max_in_flight=2 * replicas, queue_capacity=ROOM)


class TestCaller(TransportContract):
    """Copies in the caller's process, each with a thread; for a single copy see ``test_inprocess``."""

    def open(self, function: Callable[..., Any], replicas: int = 1, widths: Sequence[int] = ()) -> Engine:
        """One request in flight for each copy."""
        stage = at_widths(local("a", function, "x", "y", max(2, replicas)), *widths)
        return InProcess([stage], ["x"], ["y"], queue_capacity=ROOM)
