"""Faults in the middle of 1,000 requests over three hosts in network namespaces: ``python -m benchmarks.hostfaults [FAULT ...]``.

Each fault meets a new pipeline with a stage on node-a and one on node-b, while node-c is spare. Every answer is compared with
the model's, so a wrong order is a wrong answer. A cut card or pair drops every packet and closes nothing. After each fault the
link is mended, the node is started again, and ``Cluster.refresh`` takes the host in again. ``driver`` kills the driver itself.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import torch

import autosplit
from autosplit.commands.console import say
from autosplit.errors import AutosplitError
from autosplit.values.plan import UNKNOWN, Plan, Stage
from benchmarks.clusterdemo import kill_node
from benchmarks.namespaces import BRIDGE, NETWORK, Space, command, contain, namespaces

MODEL, REQUESTS, MBIT_PER_S = "autosplit.examples.mlp:mlp?depth=8&width=512", 1000, 1000.0
FAULTS = ("worker", "agent", "node", "card", "pair", "driver")
LEFT_S = 60.0
"""Most seconds after which everything of a killed driver must be gone."""

NOWHERE = "02:00:00:00:00:99"
"""A hardware address that no card has."""


def two_stages(traced: autosplit.Traced, first: str, second: str) -> Plan:
    """Half of the ops on each of two devices."""
    ops = [op.name for op in traced.graph.ops]
    halves = (tuple(ops[: len(ops) // 2]), tuple(ops[len(ops) // 2 :]))
    stages = tuple(Stage(f"stage{k}", half, (name,)) for k, (half, name) in enumerate(zip(halves, (first, second), strict=True)))
    return Plan(traced.source, traced.graph.hash, "", stages, UNKNOWN)


def cut_pair() -> None:
    """Drop what node-a and node-b send each other, and nothing else."""
    for space, other in (("a", 2), ("b", 1)):
        words = f"neigh replace {NETWORK}.{other} lladdr {NOWHERE} dev eth0 nud permanent"
        command("ip", "-n", f"autosplit-node-{space}", *words.split())


def mend_pair() -> None:
    """Let node-a and node-b hear each other again."""
    for space, other in (("a", 2), ("b", 1)):
        command("ip", "-n", f"autosplit-node-{space}", "neigh", "del", f"{NETWORK}.{other}", "dev", "eth0")


class Trial:
    """A cluster, a model with its right answers, and what a fault does to 1,000 requests."""

    def __init__(self, cluster: autosplit.Cluster, spaces: list[Space]) -> None:
        self.cluster, self.spaces = cluster, spaces
        self.traced = autosplit.trace(MODEL)
        self.setup = autosplit.Setup(backends=("eager",), hosts=cluster, progress=False)
        self.profile = autosplit.measure(self.traced, setup=self.setup)
        self.requests = [torch.randn_like(self.traced.example_inputs[0]) for _ in range(REQUESTS)]
        self.expected = [self.traced.run(x) for x in self.requests]

    def run(self, fault: str) -> None:
        """Let a fault happen after half of the requests, and say what came of them."""
        first, second, *_ = (device.name for device in self.cluster.machine.devices)
        with autosplit.open_pipeline(
            self.traced, two_stages(self.traced, first, second), hosts=self.cluster, profile=self.profile
        ) as model:
            strike: Callable[[], Any] = {
                "worker": lambda: os.kill(model.pipeline.pids[1], signal.SIGKILL),
                "agent": lambda: os.kill(self.cluster.hosts["node-b"].pid, signal.SIGKILL),
                "node": lambda: kill_node(self.cluster.hosts["node-b"].pid),
                "card": lambda: command("ip", "link", "set", "autosplit1", "nomaster"),
                "pair": cut_pair,
            }[fault]
            num_right, longest_s, last_s = 0, 0.0, time.monotonic()
            try:
                for number, answer in enumerate(model.stream(self.requests)):
                    num_right += torch.equal(answer, self.expected[number])
                    longest_s, last_s = max(longest_s, time.monotonic() - last_s), time.monotonic()
                    if number == REQUESTS // 2:
                        strike()
            except AutosplitError as failure:
                say(f"{fault}: {type(failure).__name__}: {failure}")
            say(f"{fault}: {num_right} of {REQUESTS} answers right and in order; longest wait {longest_s:.2f} s")
            for note in model.pipeline.replanned:
                say(f"{fault}: {note}")
        self.mend(fault)

    def mend(self, fault: str) -> None:
        """Take away the cause of a fault, and use the host again."""
        if fault == "card":
            command("ip", "link", "set", "autosplit1", "master", BRIDGE)
        if fault == "pair":
            mend_pair()
        if fault == "node":
            self.spaces[1].start()
        lost, begun_s = set(self.cluster.lost), time.monotonic()
        while lost - set(self.cluster.refresh()) and time.monotonic() - begun_s < LEFT_S:
            lost = set(self.cluster.lost)
            time.sleep(1.0)
        names = ", ".join(device.name for device in self.cluster.machine.devices)
        say(f"{fault}: used again after {time.monotonic() - begun_s:.1f} s: {names}")


def drive(address: str) -> None:
    """Send requests for ever, and say when half of 1,000 are answered."""
    with autosplit.Cluster(address) as cluster:
        trial = Trial(cluster, [])
        first, second, *_ = (device.name for device in cluster.machine.devices)
        plan = two_stages(trial.traced, first, second)
        with autosplit.open_pipeline(trial.traced, plan, hosts=cluster, profile=trial.profile) as model:
            print(json.dumps([facts.pid for facts in cluster.hosts.values()]), flush=True)
            for _ in model.stream(x for _ in iter(int, 1) for x in trial.requests):
                pass


def kill_driver(address: str) -> None:
    """Kill a driver in the middle of its requests, and say when all that it had started and written is gone."""
    code = f"from benchmarks.hostfaults import drive; drive({address!r})"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as driver:
        assert driver.stdout is not None
        agents = json.loads(driver.stdout.readline())
        time.sleep(1.0)
        started = [psutil.Process(pid) for pid in agents]
        started += [child for agent in started for child in agent.children(recursive=True)]
        files = [path for path in scratch() if path[1] in {process.pid for process in started} | {driver.pid}]
        say(f"driver: killed amid its requests; {len(started)} processes and {len(files)} folders are its on the hosts")
        driver.kill()
        begun_s = time.monotonic()
    while time.monotonic() - begun_s < LEFT_S:
        alive = [process for process in started if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]
        left = [path for path, _ in files if path.exists()]
        if not alive and not left:
            break
        time.sleep(0.1)
    say(f"driver: {len(alive)} processes and {len(left)} folders are left after {time.monotonic() - begun_s:.1f} s")


def scratch() -> Iterator[tuple[Path, int]]:
    """The scratch folders of this user, and the process that made each."""
    for marker in (Path(tempfile.gettempdir()) / f"autosplit-{os.getuid()}-scratch").glob("*/.autosplit-scratch"):
        yield marker.parent, json.loads(marker.read_text(encoding="utf-8"))["pid"]


def main(faults: list[str]) -> None:
    """Try the faults. Scratch folders lie in a folder of their own, so that nobody else removes what a killed driver leaves."""
    with tempfile.TemporaryDirectory(prefix="autosplit-ns-") as folder:
        os.environ["TMPDIR"] = tempfile.tempdir = folder
        with namespaces([MBIT_PER_S] * 3, Path(folder)) as (address, spaces):
            if "driver" in faults:
                kill_driver(address)
            if others := [fault for fault in faults if fault != "driver"]:
                with autosplit.Cluster(address) as cluster:
                    trial = Trial(cluster, spaces)
                    for fault in others:
                        trial.run(fault)


if __name__ == "__main__":
    contain()
    main(sys.argv[1:] or list(FAULTS))
