"""A user's process that forks while pipelines are open, is stopped by Ctrl-C, and ends while it computes: one process for all."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from pipelines import abandoned_since

pytestmark = pytest.mark.timeout(60)

USERS = """
# 1. requests from before a fork
import asyncio, os, signal, sys, threading, traceback
from concurrent.futures import wait
sys.path[:0] = {path!r}
import torch
from pipelines import CORES, Gate, double, local, request, spawned
from autosplit.errors import RefusedError
from autosplit.running.pipeline import InProcess, Pipeline
from autosplit.scratch import scratch_folder
from autosplit.serving.chaining import Chain
from autosplit.serving.hostmanager import HostManager

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
print("right", flush=True)

# 2. forks that live on, and Ctrl-C
def forked(task):
    child = os.fork()
    if child == 0:
        task()
    return child

def use():
    try:
        pipeline.submit(request(1))
    except RefusedError:
        os._exit(3)

with scratch_folder() as folder, Pipeline([spawned("a", "increment", "x", "y")], ["x"], ["y"]) as pipeline:
    for task, code in (sys.exit, 0), (use, 3):
        assert os.waitstatus_to_exitcode(os.waitpid(forked(task), 0)[1]) == code
    assert folder.exists() and pipeline.run(request(1))[0][0] == 2 and pipeline.restarts == 0
    print(forked(signal.pause), flush=True)
print(pipeline._transport.deployment.workers[0].fate(), flush=True)
try:
    stages = [spawned("a", "slow_increment", "x", "u"), spawned("b", "double", "u", "y", CORES[-1:])]
    with Pipeline(stages, ["x"], ["y"]) as pipeline:
        print(*pipeline.pids, flush=True)
        while True:
            pipeline.run_many([request(number) for number in range(50)])
except KeyboardInterrupt:
    print("stopped", flush=True)

# 3. an end while threads compute
weight, entered = torch.randn(300, 300), threading.Semaphore(0)

def compute(x):
    entered.release()
    for _ in range(10):
        weight @ weight
    return x

network = HostManager().add_network("net", [local("a", compute, "x", "y", replicas=4)], ["x"], ["y"], process="caller")
futures = [network.submit(request(number)) for number in range(8)]
futures[-1].add_done_callback(lambda done: print(type(done.exception()).__name__))
for _ in range(4):
    entered.acquire()
"""


@pytest.fixture(scope="module")
def told() -> Iterator[SimpleNamespace]:
    """What the process says and leaves; one of its own forks lives until the end."""
    code, before = USERS.format(path=[str(Path(__file__).parents[1])]), set(Path("/dev/shm").iterdir())
    command = [sys.executable, "-W", "ignore", "-c", code]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as host:
        assert host.stdout is not None and host.stderr is not None
        found, child = SimpleNamespace(first=host.stdout.readline(), before=before), 0
        try:
            child = int(host.stdout.readline())
            found.fate, found.pids = host.stdout.readline(), host.stdout.readline().split()
            time.sleep(0.2)
            host.send_signal(signal.SIGINT)
            found.stopped, found.last = host.stdout.readline(), host.stdout.readline()
            found.code = host.wait(20)
        finally:
            os.kill(child or host.pid, signal.SIGKILL)  # the child holds both pipes
        found.rest = host.communicate(timeout=30)
    yield found


def test_a_request_from_before_a_fork_fails_in_the_child_and_is_answered_in_the_parent(told: SimpleNamespace) -> None:
    assert told.first == "right\n"


def test_processes_that_the_user_forks_hold_up_no_end_and_nothing_is_left_after_ctrl_c(told: SimpleNamespace) -> None:
    """Hosts that are killed, and their workers, are in ``tests/devices/test_processes.py``."""
    assert (told.fate, told.stopped, len(told.pids)) == ("exited with code 0\n", "stopped\n", 2)
    until = time.monotonic() + 10
    while any(Path(f"/proc/{pid}").exists() for pid in told.pids) and time.monotonic() < until:
        time.sleep(0.01)
    assert not any(Path(f"/proc/{pid}").exists() for pid in told.pids)
    assert not abandoned_since(told.before)


def test_a_process_that_ends_while_its_threads_compute_ends_in_good_order(told: SimpleNamespace) -> None:
    """The interpreter stopped threads inside torch, which aborted the process: "terminate called without an active exception"."""
    assert (told.last, told.rest, told.code) == ("RefusedError\n", ("", ""), 0)
