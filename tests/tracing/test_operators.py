"""Operators that a stranger's graph may call check their arguments."""

import os
import subprocess
import sys
from pathlib import Path

import hostile_operators
import pytest

from autosplit.tracing.operators import ALLOWED, QUANTISED

NUM_TRIALS = int(os.environ.get("AUTOSPLIT_FUZZ_CASES", "20")) // 10


@pytest.mark.timeout(3600)
def test_no_call_with_hostile_arguments_ends_the_process_or_changes_another_tensor(tmp_path: Path) -> None:
    with (tmp_path / "call").open("wb") as last:
        command = [sys.executable, hostile_operators.__file__, str(NUM_TRIALS)]
        done = subprocess.run(command, stdout=last, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 0, f"{done.returncode} in {(tmp_path / 'call').read_text()}: {done.stderr[-2000:]}"


def test_each_listed_operator_is_called() -> None:
    called = {part for name in hostile_operators.CALLS for part in (name, *name.split("."))}
    assert not (ALLOWED | QUANTISED) - called
