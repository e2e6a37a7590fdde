"""The clock of planners in tests whose outcome depends on the work that a time limit allows."""

import time
from collections.abc import Iterator

import pytest

from autosplit.planners import clock


@pytest.fixture(scope="module")
def processor_time() -> Iterator[None]:
    """Let planners count the processor time of this process, so that other work on the machine takes nothing from a limit."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(clock, "monotonic", time.process_time)
        yield
