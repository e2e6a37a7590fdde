"""A server under load while its workers are killed: ``python -m benchmarks.serving_soak [--minutes 30] [--every 20]``.

Callers send requests with different numbers, one after the other, and compare each answer. Every ``--every`` seconds one worker
is killed, another one each time. The exit code is 1 if an accepted request (status 200) has a wrong answer, if a request has
another status than 200 and 429, or if the server's processes, files or memory grew from the first tenth of the time to the end.
"""

import argparse
import http.client
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import urlopen

import psutil
import torch

import autosplit
from autosplit.backends.workspace import Workspace
from autosplit.devices.limits import affinity
from autosplit.values.plan import UNKNOWN, Plan, Stage
from autosplit.values.planfile import write_plan

SPEC = "autosplit.examples.mlp:mlp?depth=4&width=256"
NUM_REQUESTS = 64
"""Requests with different numbers, whose answers are computed before."""

MORE_FILES, MORE_BYTES = 4, 32 << 20
"""What the server may hold more at the end than after a tenth of the time."""


def two_stages(path: Path) -> autosplit.Traced:
    """Write a plan of two stages, and return the model."""
    traced = autosplit.trace(SPEC)
    names, cores = [op.name for op in traced.graph.ops], [f"cpu:{core}" for core in affinity()[:2]]
    halves = zip(("first", "second"), (names[:3], names[3:]), (cores[0], cores[-1]), strict=True)
    stages = tuple(Stage(name, tuple(ops), (core,), "eager", 1, 1e-4) for name, ops, core in halves)
    write_plan(Plan(traced.source, traced.graph.hash, "", stages, UNKNOWN), traced.graph, path)
    return traced


class Callers:
    """Threads that ask a server until they are ended, and count what came of it."""

    def __init__(self, url: str, traced: autosplit.Traced, number: int) -> None:
        self.counts, self.ended = Counter[str](), threading.Event()
        self._place = urlsplit(url)
        inputs = torch.randn(NUM_REQUESTS, 1, 256, generator=torch.Generator().manual_seed(0))
        with torch.inference_mode():
            self._expected = [traced.program(x)[0].numpy().tobytes() for x in inputs]
        row = {"name": traced.graph.inputs[0], "datatype": "FP32", "shape": [1, 256], "parameters": {"binary_data_size": 1024}}
        text = json.dumps({"inputs": [row], "parameters": {"binary_data_output": True}}).encode()
        self._headers = {"inference-header-content-length": str(len(text))}
        self._bodies = [text + x.numpy().tobytes() for x in inputs]
        self._threads = [threading.Thread(target=self._call, args=(first,)) for first in range(number)]
        for thread in self._threads:
            thread.start()

    def end(self) -> None:
        """Wait for the last answers."""
        self.ended.set()
        for thread in self._threads:
            thread.join()

    def _call(self, number: int) -> None:
        connection = http.client.HTTPConnection(self._place.hostname or "", self._place.port, timeout=60)
        while not self.ended.is_set():
            number = (number + 1) % NUM_REQUESTS
            try:
                connection.request("POST", "/v2/models/model/infer", self._bodies[number], self._headers)
                answer = connection.getresponse()
                content = answer.read()
            except (OSError, http.client.HTTPException) as failure:
                self.counts[type(failure).__name__] += 1
                connection.close()
                continue
            right = content[int(answer.headers.get("inference-header-content-length", "0")) :] == self._expected[number]
            self.counts[
                "right" if answer.status == 200 and right else "wrong" if answer.status == 200 else str(answer.status)
            ] += 1
        connection.close()


def workers_of(url: str) -> list[int]:
    """The processes of the stages in their order, from the first event of the live page."""
    with urlopen(f"{url}/events", timeout=60) as events:
        told = json.loads(events.readline().removeprefix(b"data: "))
    return [worker["pid"] for worker in told["workers"]]


def held(server: psutil.Process) -> tuple[int, int, int]:
    """Processes, files and bytes of memory of the server, its workers left out of the memory."""
    return len(server.children(recursive=True)), server.num_fds(), server.memory_info().rss


def main() -> int:
    """Run the load, print what came of it, and return 1 if anything is not as it must be."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--every", type=float, default=20.0)
    parser.add_argument("--callers", type=int, default=8)
    given = parser.parse_args()
    with Workspace() as workspace, ExitStack() as stack:
        traced = two_stages(workspace.folder / "plan.yaml")
        words = [sys.executable, "-m", "autosplit", "serve", f"model={workspace.folder / 'plan.yaml'}", "--port", "0", "--json"]
        process = stack.enter_context(subprocess.Popen(words, stdout=subprocess.PIPE, text=True))
        stack.callback(process.terminate)
        assert process.stdout is not None
        url, server = json.loads(process.stdout.readline())["url"], psutil.Process(process.pid)
        callers = Callers(url, traced, given.callers)
        stack.callback(callers.end)
        begun_s, num_kills, early = time.monotonic(), 0, held(server)
        while (past_s := time.monotonic() - begun_s) < 60 * given.minutes:
            time.sleep(given.every)
            workers = workers_of(url)
            os.kill(workers[num_kills % len(workers)], signal.SIGKILL)
            num_kills += 1
            if past_s < 6 * given.minutes:
                early = held(server)
            print(
                f"{past_s:.0f} s: {num_kills} kills, {dict(callers.counts)}, processes, files, bytes: {held(server)}", flush=True
            )
        time.sleep(given.every)
        callers.end()
        late = held(server)
        counts = callers.counts
    grown = late[0] > early[0] or late[1] > early[1] + MORE_FILES or late[2] > early[2] + MORE_BYTES
    print(f"{num_kills} kills; {dict(counts)}; processes, files, bytes: {early}, at the end {late}")
    return int(grown or set(counts) - {"right", "429"} != set() or not counts["right"])


if __name__ == "__main__":
    sys.exit(main())
