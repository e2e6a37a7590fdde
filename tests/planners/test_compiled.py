"""Machine code is kept by the sources of all compiled modules, and everything can be compiled ahead of time."""

import subprocess
import sys
from pathlib import Path

import pytest

from autosplit.planners import compiled, walking, warming
from autosplit.planners.filling import add
from autosplit.planners.hypergraph import hypergraph_of


def test_a_changed_module_changes_the_stamp_of_all(tmp_path: Path) -> None:
    (tmp_path / "one.py").write_text("from autosplit.planners.compiled import inner\n")
    (tmp_path / "other.py").write_text("x = 1\n")
    before = compiled.source_stamp(tmp_path)
    (tmp_path / "other.py").write_text("x = 2\n")
    compiled.source_stamp.cache_clear()
    assert compiled.source_stamp(tmp_path) == before
    (tmp_path / "one.py").write_text("from autosplit.planners.compiled import inner, compiled\n")
    compiled.source_stamp.cache_clear()
    assert compiled.source_stamp(tmp_path) != before


def test_numba_keeps_machine_code_by_that_stamp() -> None:
    stamp = compiled.source_stamp(Path(compiled.__file__).parent)
    for function in (add, walking.run):
        assert function._cache._cache_file._source_stamp == stamp


def test_everything_is_compiled_ahead(capsys) -> None:
    warming.main()
    assert len(capsys.readouterr().err.splitlines()) == len(warming.PARTS)
    assert hypergraph_of(warming.small_problem()).exact
    assert walking.run.signatures


CALLED = """
import autosplit.planners
from importlib import import_module
from numba.core.registry import CPUDispatcher
from pkgutil import iter_modules
from autosplit.planners import warming

warming.main()
for module in [import_module(f"autosplit.planners.{one.name}") for one in iter_modules(autosplit.planners.__path__)]:
    for name, function in vars(module).items():
        called = isinstance(function, CPUDispatcher) and not function.targetoptions.get("no_cpython_wrapper")
        if called and not function.signatures:
            print(f"{module.__name__}.{name}")
"""


def test_no_function_that_python_calls_is_left_out() -> None:
    """In a process of its own, where no other test has called one; what only compiled code calls is ``inner``."""
    found = subprocess.run([sys.executable, "-c", CALLED], capture_output=True, text=True, check=True)
    assert found.stdout.splitlines() == []


@pytest.mark.parametrize(("cause", "seen"), [(KeyboardInterrupt(), KeyboardInterrupt), (ValueError(), SystemError)])
@pytest.mark.parametrize("depth", [1, 3])
def test_an_interrupt_that_python_calls_a_system_error_is_one_again(cause: BaseException, seen: type, depth: int) -> None:
    failure = cause
    for _ in range(depth):
        outer = SystemError("returned a result with an exception set")
        outer.__cause__ = failure
        failure = outer
    with pytest.raises(seen), compiled.interruptible():
        raise failure
