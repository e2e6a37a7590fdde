"""Ctrl-C while the solver works, and after it."""

import subprocess
import sys

import pytest

SCRIPT = """
import os, random, signal, threading
from ortools.sat.python import cp_model
from autosplit.memory.lives import ALIGNMENT, Life
from autosplit.memory.packing import pack
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
draw = random.Random(0)
lives = [Life((f"v{n}",), ALIGNMENT * draw.randint(1, 99), n // 4, n // 4 + draw.randint(0, 30)) for n in range(160)]
stacked = [sum(life.num_bytes for life in lives[:n]) for n in range(len(lives))]
for call in (lambda: solve(golomb(18), now() + 1000.0, 0), lambda: pack(lives, stacked, 0, 1000.0)):
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
    try:
        call()
    except KeyboardInterrupt:
        print("heard meanwhile")
"""


@pytest.mark.timeout(120)
def test_ctrl_c_is_heard_while_the_solver_works_and_after_it() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=100)
    assert done.stdout.splitlines() == ["heard after", "heard meanwhile", "heard meanwhile"], (done.returncode, done.stderr)
