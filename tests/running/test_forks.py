"""A process that was forked from one with requests under way: their futures fail there, and hold nobody up."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(60)

FORKS = """
import asyncio, os, sys, traceback
from concurrent.futures import wait
sys.path[:0] = {path!r}
import torch
from pipelines import Gate, double, local, request
from autosplit.errors import RefusedError
from autosplit.running.pipeline import InProcess, Pipeline
from autosplit.serving.chaining import Chain

def refused(call, *arguments):
    try:
        call(*arguments)
    except RefusedError as refusal:
        return str(refusal)
    raise AssertionError(call)

def in_child():
    assert answered.result()[0][0] == 2 and answered.exception() is None
    assert not wait(futures, 5).not_done
    for future in futures:
        assert f"its answer goes to process {{os.getppid()}} alone" in refused(future.result, 5)
        called = []
        future.add_done_callback(called.append)
        assert called == [future] and isinstance(future.exception(5), RefusedError) and not future.cancel()
        assert "before the fork" in refused(asyncio.run, awaits(future))
    for engine in (ring, here):
        assert "opened the pipeline" in refused(next, engine.stream([request(1)]))
        assert "opened the pipeline" in refused(engine.run, request(1))
        engine.close()
    assert "opened the pipeline" in refused(list, begun)

async def awaits(future):
    return await asyncio.wrap_future(future)

gate, calls = Gate(), []
gate.opened.set()
stage = local("a", gate, "x", "y", replicas=2)
other = InProcess([local("a", double, "x", "y")], ["x"], ["y"])
with Pipeline([stage], ["x"], ["y"]) as ring, InProcess([stage], ["x"], ["y"]) as here:
    gate.opened.clear()
    answered, chain = other.submit(request(1)), Chain([("ring", ring), ("here", here)])
    begun = ring.stream([request(1), request(1)])
    futures = [ring.submit(request(1)), here.submit(request(1)), chain.submit(request(1))]
    for future in futures:
        future.add_done_callback(lambda done: calls.append(os.getpid()))
    child = os.fork()
    if child == 0:
        try:
            in_child()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    gate.opened.set()
    assert [float(future.result(20)[0][0]) for future in futures] == [2, 2, 3] and calls == [os.getpid()] * 3
    assert len(list(begun)) == 2
print("right")
"""


def test_a_request_from_before_a_fork_fails_in_the_child_and_is_answered_in_the_parent() -> None:
    code = FORKS.format(path=[str(Path(__file__).parents[1])])
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, timeout=50, check=False)
    assert (done.stdout, done.stderr, done.returncode) == ("right\n", "", 0)
