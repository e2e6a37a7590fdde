"""Operators that a stranger's graph may call: each checks its arguments, and those that do not are refused."""

import subprocess
import sys

import hostile_operators

from autosplit.tracing.operators import ALLOWED

NUM_TRIALS = 20


def test_listed_operators_check_hostile_arguments(tmp_path):
    """No call ends the process by a signal, or changes a tensor that it was not given."""
    with (tmp_path / "call").open("wb") as calls:
        done = subprocess.run(
            [sys.executable, hostile_operators.__file__, str(NUM_TRIALS)],
            stdout=calls,
            stderr=subprocess.PIPE,
            text=True,
            timeout=200,
            check=False,
        )
    assert done.returncode == 0, f"{done.returncode} after {(tmp_path / 'call').read_text()}: {done.stderr[-2000:]}"


def test_each_listed_operator_is_tried():
    tried = {name.partition(".")[0] for name in hostile_operators.CALLS} | set(hostile_operators.CALLS)
    assert {name.partition(".")[0] for name in ALLOWED} <= tried
