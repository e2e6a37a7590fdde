"""Operators that a stranger's graph may call check their arguments."""

import os
from pathlib import Path

import hostile_operators
import pytest

from autosplit.devices.processes import receive, spawn_worker
from autosplit.errors import WorkerError
from autosplit.tracing.operators import ALLOWED, QUANTISED

NUM_TRIALS = int(os.environ.get("AUTOSPLIT_FUZZ_CASES", "20")) // 10


@pytest.mark.timeout(3600)
def test_no_call_with_hostile_arguments_ends_the_process_or_changes_another_tensor(tmp_path: Path) -> None:
    worker, call = spawn_worker("hostile_operators:main", name="calls", threads=1), tmp_path / "call"
    worker.connection.send((NUM_TRIALS, call))
    try:
        assert receive(worker, 3600.0, "during a call") == "right"
    except WorkerError as failure:
        pytest.fail(f"{failure}: {call.read_text()}")
    worker.close()


def test_each_listed_operator_is_called() -> None:
    called = {part for name in hostile_operators.CALLS for part in (name, *name.split("."))}
    assert not (ALLOWED | QUANTISED) - called
