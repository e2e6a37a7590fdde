"""Ctrl-C while the solver works, and after it."""

import subprocess
import sys

import pytest

SCRIPT = """
import os, signal, threading
from ortools.sat.python import cp_model
from autosplit.planners.clock import now
from autosplit.planners.cpsat.solver import solve

def golomb(num_marks):
    model = cp_model.CpModel()
    marks = [model.NewIntVar(0, num_marks**2, "") for _ in range(num_marks)]
    for left, right in zip(marks, marks[1:]):
        model.Add(left < right)
    model.AddAllDifferent([right - left for at, left in enumerate(marks) for right in marks[at + 1 :]])
    model.Minimize(marks[-1])
    return model

solver, _ = solve(golomb(4), now() + 60.0, 0)
assert solver.ObjectiveValue() == 6
try:
    signal.raise_signal(signal.SIGINT)
except KeyboardInterrupt:
    print("heard after")
threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
try:
    solve(golomb(18), now() + 1000.0, 0)
except KeyboardInterrupt:
    print("heard meanwhile")
"""


@pytest.mark.timeout(120)
def test_ctrl_c_is_heard_while_the_solver_works_and_after_it() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=100)
    assert done.stdout.splitlines() == ["heard after", "heard meanwhile"], (done.returncode, done.stderr)
