"""Machine code is kept by the sources of all compiled modules, and everything can be compiled ahead of time."""

import logging
import os
import subprocess
import sys
from math import inf
from pathlib import Path
from types import SimpleNamespace

import pytest
from problems import chain

from autosplit import jit
from autosplit.planners import warming
from autosplit.planners.contiguous import downset_enumeration, downsets
from autosplit.planners.instance import contract
from autosplit.planners.noncontiguous.hypergraph import hypergraph_of
from autosplit.values.constraints import Demands


def test_a_changed_module_changes_the_stamp_of_all(tmp_path: Path) -> None:
    (tmp_path / "one.py").write_text("from autosplit.jit import inner\n")
    (tmp_path / "other.py").write_text("x = 1\n")
    stamp = jit.source_stamp.__wrapped__
    before = stamp(tmp_path)
    (tmp_path / "other.py").write_text("x = 2\n")
    assert stamp(tmp_path) == before
    (tmp_path / "one.py").write_text("from autosplit.jit import inner, compiled\n")
    assert stamp(tmp_path) != before


def test_a_changed_module_changes_the_stamp_of_those_that_call_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jit, "PACKAGE", tmp_path)
    for folder, line in (("lower", "x = 1"), ("upper", "from autosplit.lower.loops import x")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "loops.py").write_text(f"from autosplit.jit import inner\n{line}\n")
    stamp = jit.source_stamp.__wrapped__
    lower, upper = stamp(tmp_path / "lower"), stamp(tmp_path / "upper")
    (tmp_path / "lower" / "loops.py").write_text("from autosplit.jit import inner\nx = 2\n")
    assert stamp(tmp_path / "lower") != lower and stamp(tmp_path / "upper") != upper


def test_all_installations_of_a_version_share_machine_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # each installation compiled for 13 to 40 s at its first call
    monkeypatch.setenv("AUTOSPLIT_CACHE", str(tmp_path))
    made = [jit.code_folder.__wrapped__(f"{number:016d}") for number in range(jit.NUM_VERSIONS + 1)]
    assert made[-1] == tmp_path / "numba" / f"{jit.NUM_VERSIONS:016d}"
    assert len([*(tmp_path / "numba").iterdir()]) == jit.NUM_VERSIONS and made[-1].is_dir()
    assert (tmp_path / "numba").stat().st_mode & 0o777 == 0o700  # what lies there is unpickled
    monkeypatch.setenv("AUTOSPLIT_CACHE", str(tmp_path / "file"))
    (tmp_path / "file").write_text("")
    assert jit.code_folder.__wrapped__("a") is None


def test_everything_is_compiled_ahead(capsys) -> None:
    warming.main()
    assert len(capsys.readouterr().err.splitlines()) == len(warming.PARTS)
    assert hypergraph_of(warming.small_problem()).exact
    assert downset_enumeration.run.signatures


def test_only_the_planner_is_said_to_compile(caplog: pytest.LogCaptureFixture) -> None:
    # the fork server compiles the attention of its workers, and said the same as the host
    jit._say_once.cache_clear()
    caplog.set_level(logging.WARNING, jit.__name__)  # warming in this process has silenced it
    for module in ("generating.rows", "planners.loads", "planners.instance"):
        function = SimpleNamespace(py_func=SimpleNamespace(__module__=f"autosplit.{module}"))
        jit._Notice().on_start(SimpleNamespace(data={"dispatcher": function}))
        assert len(caplog.records) == (module != "generating.rows")


def test_one_class_of_devices_runs_the_machine_code_of_several() -> None:
    # on equal devices walks got an array in the other layout, for which they were compiled once more: 10 s
    for problem in (warming.small_problem(), chain([1.0, 2.0, 3.0])):
        downsets.best_chain(contract(problem, Demands()), inf, inf)
    assert len(downset_enumeration.run.signatures) == 1


SOLVES = """
from dataclasses import replace
from importlib import import_module
from pkgutil import walk_packages

import numpy as np
from numba.core import event
from numba.core.registry import CPUDispatcher
from problems import chain, random_problem

import autosplit.planners
from autosplit.planners import warming
from autosplit.planners.portfolio import solve
from autosplit.values.constraints import Demands

class Compiled(event.Listener):
    def on_start(self, event):
        function = event.data["dispatcher"].py_func
        if function.__module__.startswith("autosplit."):
            print(f"{function.__module__}.{function.__qualname__}")

    def on_end(self, event):
        pass

warming.main()
for module in [import_module(one.name) for one in walk_packages(autosplit.planners.__path__, "autosplit.planners.")]:
    for name, function in vars(module).items():
        called = isinstance(function, CPUDispatcher) and not function.targetoptions.get("no_cpython_wrapper")
        if called and not function.signatures:
            print(f"{module.__name__}.{name}")
event.register("numba:compile", Compiled())
capped = replace(chain([1.0, 2.0, 3.0, 1.0, 2.0], num_devices=3), op_bytes=np.ones(5), memory_bytes=np.full(3, 3.0))
asked = Demands(), Demands(contiguous=False), Demands(objective="latency"), Demands(max_replicas=2), Demands(reuse=True)
for problem in (capped, random_problem(0, num_ops=7)):
    for demands in asked:
        solve(problem, demands, time_limit_s=0.2)
"""


def test_warming_compiles_every_function_that_python_calls_as_solvers_call_it() -> None:
    """In a process of its own, where no other test has compiled anything; what only compiled code calls is ``inner``."""
    path = os.pathsep.join([str(Path(__file__).parents[1]), *sys.path])
    found = subprocess.run(
        [sys.executable, "-c", SOLVES], capture_output=True, text=True, check=True, env=os.environ | {"PYTHONPATH": path}
    )
    assert found.stdout.splitlines() == []


@pytest.mark.parametrize(("cause", "seen"), [(KeyboardInterrupt(), KeyboardInterrupt), (ValueError(), SystemError)])
@pytest.mark.parametrize("depth", [1, 3])
def test_an_interrupt_that_python_calls_a_system_error_is_one_again(cause: BaseException, seen: type, depth: int) -> None:
    failure = cause
    for _ in range(depth):
        outer = SystemError("returned a result with an exception set")
        outer.__cause__ = failure
        failure = outer
    with pytest.raises(seen), jit.interruptible():
        raise failure
