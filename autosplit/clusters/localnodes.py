"""Ray nodes on this machine, for trying a cluster out. A process of its own keeps them.

Ray's classes for several nodes on one machine (``ray.cluster_utils``) are its own test tools. Only ``keep`` uses them.
"""

import contextlib
import os
import secrets
import signal
import string
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from unittest import mock

from autosplit.children import python_running
from autosplit.devices.limits import affinity
from autosplit.errors import DeviceError
from autosplit.scratch import scratch_folder

LOOPBACK = "127.0.0.1"
LABEL = "autosplit-host"
"""The label of a local node that gives its name."""

OBJECT_STORE_BYTES = 96 << 20
"""Shared memory of a local node for files on their way; Ray writes what exceeds it to disk."""

NICENESS = "RAY_worker_niceness"
"""Where Ray reads the niceness of what it starts. It is 15 by default: stages would get what all other processes leave."""

START_S, ENDING_S = 120.0, 20.0
_ADDRESS = "address of the first node: "


@contextlib.contextmanager
def local_nodes(count: int) -> Iterator[str]:
    """Start nodes on this machine that listen on loopback alone, and yield the address of the first.

    A process of its own keeps them, and ends all of their processes when this one ends, however it ends.

    Raises: DeviceError: the nodes did not start.
    """
    import ray._private.ray_constants as constants

    with own_token(), mock.patch.object(constants, "ENABLE_RAY_CLUSTER", new=False):
        keeper = subprocess.Popen(
            python_running(f"from autosplit.clusters.localnodes import keep; keep({count})"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            process_group=0,
        )
        with keeper:
            assert keeper.stdin is not None and keeper.stdout is not None
            try:
                address = next((line for line in iter(keeper.stdout.readline, "") if line.startswith(_ADDRESS)), "")
                if not address:
                    raise DeviceError(f"{count} Ray nodes could not be started on this machine within {START_S:.0f} s")
                yield address.removeprefix(_ADDRESS).strip()
            finally:
                keeper.stdin.close()
                try:
                    keeper.wait(ENDING_S)  # after Ctrl-C, the end of the block would not wait
                except subprocess.TimeoutExpired:
                    os.killpg(keeper.pid, signal.SIGKILL)


@contextlib.contextmanager
def own_token() -> Iterator[None]:
    """Let nodes that are started in a block ask for a token that only this process and its children have.

    Without it, every user of this machine could run code as this one, through the ports of the nodes.
    """
    from ray._raylet import AuthenticationTokenLoader, Config  # type: ignore[attr-defined]

    before = {name: os.environ.get(name) for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN")}

    def set_to(values: Mapping[str, str | None]) -> None:
        for name, value in values.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
        AuthenticationTokenLoader.instance().reset_cache()  # Ray reads the environment once, unless it is told to
        Config.initialize("")

    set_to({"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)})
    try:
        yield
    finally:
        set_to(before)


def keep(count: int) -> None:
    """The process that keeps local nodes: start them, write the address of the first, and end them as soon as stdin ends.

    Each node has its share of the cores; where there are fewer cores than nodes, nodes share them.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that wants the nodes
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    threading.Thread(target=_end_with_stdin, daemon=True).start()
    import ray._private.ray_constants as constants
    from ray.cluster_utils import Cluster

    # Ray would replace 127.0.0.1 by an address that other machines reach, and listen there.
    constants.ENABLE_RAY_CLUSTER = False
    cores = affinity()
    try:
        with scratch_folder() as folder, contextlib.ExitStack() as started:
            # Ray writes the address of its newest cluster to a file for ``auto``; that of these nodes must not go there.
            (folder / "ray").mkdir()
            os.environ |= {"RAY_TMPDIR": str(folder), NICENESS: "0"}
            cluster = Cluster()
            started.callback(cluster.shutdown)
            for number in range(count):
                share = cores[number::count] or [cores[number % len(cores)]]
                os.sched_setaffinity(0, share)  # the processes of the node inherit it
                cluster.add_node(
                    wait=False,
                    num_cpus=len(share),
                    object_store_memory=OBJECT_STORE_BYTES,
                    include_dashboard=False,
                    include_log_monitor=False,
                    no_monitor=True,
                    node_ip_address=LOOPBACK,
                    temp_dir=str(folder),
                    labels={LABEL: f"node-{string.ascii_lowercase[number]}"},
                )
            os.sched_setaffinity(0, cores)
            cluster.wait_for_nodes(START_S)
            print(f"{_ADDRESS}{cluster.address}", flush=True)
            threading.Event().wait()
    finally:
        os.killpg(0, signal.SIGKILL)


def _end_with_stdin() -> None:
    sys.stdin.read()
    os.kill(os.getpid(), signal.SIGTERM)
