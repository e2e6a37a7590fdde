"""The clock of planners in tests whose outcome depends on the work that a time limit allows."""

import sys
import time
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module")
def processor_time() -> Iterator[None]:
    """Let planners count the processor time of this process, so that other work on the machine takes nothing from a limit."""
    planners = [module for name, module in sys.modules.items() if name.startswith("autosplit.planners.")]
    with pytest.MonkeyPatch.context() as patch:
        for module in planners:
            if hasattr(module, "monotonic"):
                patch.setattr(module, "monotonic", time.process_time)
        yield
