"""Where the kernel refuses another thread or process, the caller reads which limit holds and how to raise it."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

OTHER_USER = "61234"
"""The kernel limits the processes of each user, but not those of root."""

OPENED = """
import resource, psutil
from pathlib import Path
from pipelines import CORES, spec
from autosplit.devices import forkserver
from autosplit.errors import WorkerError
from autosplit.serving.pipelineconfig import PipelineConfig

config = PipelineConfig()
config.add_function("f", "pipelines:increment", ["pipelines"], [spec("x")], [spec("y")], CORES[:1] * 2)
config.input("x").connect(config["f"].input("x"))
config["f"].output(0).connect(config.output("y"))
this, num_threads = psutil.Process(), psutil.Process().num_threads()
# The caller needs a thread that starts workers, a fork server, two workers, and a thread that serves requests.
for limit in (num_threads, num_threads + 2, num_threads + 4, 64):
    resource.setrlimit(resource.RLIMIT_NPROC, (limit, 64))
    try:
        config.build(Path.cwd()).close()
        print("opened")
    except WorkerError as failure:
        print(limit, failure)
    for server in this.children():  # it has the limit with which it was started
        resource.prlimit(server.pid, resource.RLIMIT_NPROC, (64, 64))
        assert not server.children(), "a worker stayed behind"
forkserver.close()
assert not this.children(), "a process stayed behind"
"""


@pytest.mark.skipif(os.getuid() != 0 or shutil.which("setpriv") is None, reason="only root can be another user without processes")
def test_a_pipeline_without_room_for_its_threads_and_processes_says_which_limit_holds() -> None:
    """Threads raised a plain RuntimeError: those that start workers, and those that serve requests."""
    capability = ["--inh-caps", "-all,+dac_read_search", "--ambient-caps", "-all,+dac_read_search"]  # the tests may lie in /root
    other = ["setpriv", "--reuid", OTHER_USER, "--regid", OTHER_USER, "--clear-groups", *capability]
    tests = Path(__file__).parents[1]
    path = os.pathsep.join([str(tests), str(tests.parent)])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "HOME": "/"}
    code = [*other, "--bounding-set", "-all,+dac_read_search", sys.executable, "-c", OPENED]
    done = subprocess.run(code, env=environment, cwd="/", capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    *refused, last = done.stdout.splitlines()
    assert last == "opened"
    for line in refused:
        limit, _, sentence = line.partition(" ")
        assert f"; {limit} processes and threads are allowed here; raise that limit ('ulimit -u'" in sentence
    assert ["can't start new thread" in line for line in refused] == [True, False, True]
