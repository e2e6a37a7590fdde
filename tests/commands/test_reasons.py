"""A shortage of memory, threads or processes is a sentence with the limit and the way out, wherever it was noticed."""

import subprocess
import sys

import pytest

from autosplit.commands.reasons import is_expected, reason
from autosplit.errors import WorkerError


@pytest.mark.parametrize(
    ("failure", "said"),
    [
        (MemoryError(), "MemoryError; memory ran out; close other programs"),
        (ImportError("libtorch_cpu.so: failed to map segment from shared object"), "libtorch_cpu.so: failed to map"),
        (RuntimeError("[enforce fail] err == 0. DefaultCPUAllocator: can't allocate memory"), "memory ran out"),
        (RuntimeError("can't start new thread"), "'ulimit -u'"),
        (WorkerError("the worker failed:\n  File 'a', line 1\nRuntimeError: can't start new thread"), "'ulimit -u'"),
    ],
)
def test_a_shortage_is_one_line_with_the_way_out(failure: Exception, said: str) -> None:
    assert is_expected(failure) and said in reason(failure) and "\n" not in reason(failure)
    outer = SystemError("error return without exception set")
    outer.__cause__ = failure
    assert is_expected(outer)


def test_another_failure_keeps_its_traceback_and_a_way_out_is_not_given_twice() -> None:
    assert not is_expected(KeyError("a"))
    text = "no worker could be forked: Resource temporarily unavailable; raise that limit ('ulimit -u')"
    assert reason(WorkerError(text)) == text


@pytest.mark.parametrize("limit_kib,shown", [(300_000, "293.0 MiB"), (1_000_000, "976.6 MiB")])
def test_a_command_with_little_address_space_says_so(limit_kib: int, shown: str) -> None:
    """With 1 GB OpenBLAS ended the process."""
    command = f"ulimit -v {limit_kib}; exec '{sys.executable}' -m autosplit.cli search autosplit.examples.mlp:mlp"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert f"may use {shown} of address space; raise that limit ('ulimit -v unlimited')" in " ".join(done.stderr.split())
