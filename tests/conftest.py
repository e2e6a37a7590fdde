"""What holds for all tests: few searches for garbage among the million objects of torch, and short measurements."""

import atexit
import compileall
import gc
import logging
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fuzzing import FUZZES, examples
from hypothesis import settings

from autosplit.files import cache_folder

# A deadline of 0.2 s for an example fails by chance on a busy machine, and so do new cases at each run: a change is not to blame.
settings.register_profile("autosplit", deadline=None, max_examples=examples(100), derandomize=not FUZZES)
settings.load_profile("autosplit")

if "PYTEST_XDIST_WORKER" not in os.environ:  # workers share the folder, which leaves the user's own alone
    own = cache_folder()
    os.environ["AUTOSPLIT_CACHE"] = tempfile.mkdtemp(prefix="autosplit-cache-")
    if (own / "numba").is_dir():  # the planner's machine code takes half a minute to compile
        shutil.copytree(own / "numba", Path(os.environ["AUTOSPLIT_CACHE"]) / "numba")
    atexit.register(shutil.rmtree, os.environ["AUTOSPLIT_CACHE"], ignore_errors=True)

# Torch's threads spin while they wait, which takes the core of the other test process: a trace cost 1.7 times the processor time.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("AOT_INDUCTOR_COMPILE_WRAPPER_OPT_LEVEL", "O0")  # a stage compiles in five sixths of the time
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")  # else four libraries are compiled and loaded, to try the core's flags
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # of a shell's background job, and of every child that gets Ctrl-C here
    signal.signal(signal.SIGINT, signal.default_int_handler)
os.environ.pop("COLUMNS", None)  # pytest-xdist sets it, and tables are as wide as it says


class WithoutExamples:
    """Files that are not collected: each test process imported all of the package to look for examples in docstrings."""

    def pytest_ignore_collect(self, collection_path: Path) -> bool | None:
        """Leave out a module that has neither tests nor, by its text, an example."""
        is_module = collection_path.suffix == ".py" and not collection_path.name.startswith("test_")
        return True if is_module and b">>> " not in collection_path.read_bytes() else None


def pytest_configure(config: pytest.Config) -> None:
    """Register what holds for files outside of this folder too."""
    config.pluginmanager.register(WithoutExamples())
    is_kept = not sys.dont_write_bytecode and config.getoption("assertmode") == "rewrite"
    if is_kept and "PYTEST_XDIST_WORKER" in os.environ:
        compile_a_share(config, int(os.environ["PYTEST_XDIST_WORKER"][2:]), int(os.environ["PYTEST_XDIST_WORKER_COUNT"]))


def compile_a_share(config: pytest.Config, number: int, count: int) -> None:
    """Compile every ``count``-th file for all test processes: in a fresh clone each compiled all of them, for 7 s of its core."""
    from _pytest.assertion import rewrite

    tests = Path(__file__).parent
    for path in sorted([*tests.rglob("*.py"), *(tests.parent / "autosplit").rglob("*.py")])[number::count]:
        kept = rewrite.get_cache_dir(path) / f"{path.stem}{rewrite.PYC_TAIL}"
        if not path.name.startswith("test_"):
            compileall.compile_file(path, quiet=2)
        elif rewrite._read_pyc(path, kept) is None:
            source_hash, code = rewrite._rewrite_test(path, config)
            rewrite.try_makedirs(kept.parent)
            rewrite._write_pyc(config.stash[rewrite.assertstate_key], code, source_hash, kept)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[Any]:
    """Import all tests without a search for garbage, never search what they loaded, and search less often: a tenth less time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.set_threshold(700, 10, 100)
        gc.enable()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Search for the garbage of a file of tests once: no later search walks what is left, nor that at the end of the process."""
    if nextitem is None or nextitem.path != item.path:
        gc.collect()
        gc.freeze()


def pytest_collection_finish() -> None:
    """Shorten measurements where torch was imported; the fast tests do without it."""
    if "torch" in sys.modules:
        import brief

        # pytest hears every logger that does not propagate, and torch then writes a record with a stack for each step of a trace
        steps = logging.getLogger("torch.__trace")
        steps.propagate = True
        steps.handlers.clear()

        brief.measure_briefly()
        brief.compile_in_one_process()
        brief.load_exporters_once()
        brief.keep_the_speed_of_cores()
        brief.measure_links_once()
        brief.measure_side_by_side()
