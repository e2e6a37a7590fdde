"""Ray nodes on this machine, for trying a cluster out, started with Ray's own command ``ray start``.

A separate process, the keeper, starts the nodes and ends them as soon as its parent has ended.
"""

import contextlib
import ctypes
import os
import secrets
import signal
import string
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from typing import Any

import psutil

from autosplit.children import python_running
from autosplit.compat.raysettings import reread_settings
from autosplit.devices.limits import affinity
from autosplit.errors import DeviceError
from autosplit.scratch import scratch_folder

LOOPBACK = "127.0.0.1"
ALIAS = "127.0.0.01"
"""Loopback as the clients of Ray must write it: they replace ``127.0.0.1`` by an address that other machines reach."""

LABEL = "autosplit-host"
"""The label of a local node that gives its name."""

OBJECT_STORE_BYTES = 96 << 20
"""Shared memory of a local node for files on their way; Ray writes files beyond it to disk."""

NICENESS = "RAY_worker_niceness"
"""Variable with the niceness of the processes that Ray starts: 15 by default, so stages would run after all other processes."""

MAX_LOCAL = 16
START_S, ENDING_S, KILL_S = 120.0, 20.0, 10.0

SHOWN_LINES = 8
"""Last lines of the output of failed nodes that the error shows."""

_READY = "will now block"
"""Ray's command prints this once its node has started and the file with the address is written."""

_PR_SET_PDEATHSIG = 1


@contextlib.contextmanager
def local_nodes(count: int) -> Iterator[str]:
    """Start nodes on this machine that listen on loopback alone, and yield the address of the first.

    Raises: DeviceError: the nodes did not start; the message has the end of their output.
    """
    with own_token(), tempfile.TemporaryFile() as output:
        keeper = subprocess.Popen(
            python_running(f"from autosplit.clusters.localnodes import keep; keep({count})"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=output,
            text=True,
            process_group=0,  # Ctrl-C is for the process that wants the nodes
        )
        with keeper:
            assert keeper.stdin is not None and keeper.stdout is not None
            try:
                address = keeper.stdout.readline().strip()
                if not address:
                    output.seek(0)
                    lines = output.read().decode(errors="replace").splitlines()[-SHOWN_LINES:]
                    end = "\n    ".join(["their output ends with:", *lines]) if lines else "they wrote nothing"
                    raise DeviceError(f"{count} Ray nodes could not be started on this machine; {end}")
                yield address
            finally:
                keeper.stdin.close()
                try:
                    keeper.wait(ENDING_S)  # after Ctrl-C, the end of the block would not wait
                except subprocess.TimeoutExpired:
                    keeper.kill()  # the kernel ends the nodes with it


@contextlib.contextmanager
def own_token() -> Iterator[None]:
    """Let nodes that are started in a block ask for a token that only this process and its children have.

    Without it, every user of this machine could run code as this one, through the ports of the nodes.
    """
    before = {name: os.environ.get(name) for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN")}

    def set_to(values: Mapping[str, str | None]) -> None:
        for name, value in values.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
        reread_settings()

    set_to({"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)})
    try:
        yield
    finally:
        set_to(before)


def keep(count: int) -> None:
    """The keeper: start nodes, print the address of the first, and end all processes of the nodes as soon as stdin ends.

    Each node has its share of the cores; where there are fewer cores than nodes, nodes share them.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    threading.Thread(target=_end_with_stdin, daemon=True).start()
    cores = affinity()
    try:
        with scratch_folder() as folder, _killed_at_the_end():
            os.chdir(folder)
            address = ""
            for number in range(count):
                os.sched_setaffinity(0, cores[number::count] or [cores[number % len(cores)]])  # the node inherits it
                _start(number, [f"--address={address}"] if address else ["--head", "--port=0", "--include-dashboard=false"])
                address = (folder / "ray_current_cluster").read_text(encoding="utf-8").replace(LOOPBACK, ALIAS)
            print(address, flush=True)
            threading.Event().wait()
    except Exception as failure:
        print(f"{type(failure).__name__}: {failure}", file=sys.stderr, flush=True)


def _start(number: int, where: list[str]) -> None:
    """Start a node and wait for it. Its folder has a short name, because the path of a Unix socket has at most 107 bytes.

    Raises: DeviceError: the node ended; its output is on stderr.
    """
    command = python_running("from ray.scripts.scripts import main; main()", "start", "--block", *where)
    command += [
        f"--temp-dir=/proc/{os.getpid()}/cwd",
        f"--labels={LABEL}=node-{string.ascii_lowercase[number]}",
        f"--num-cpus={len(affinity())}",
        f"--object-store-memory={OBJECT_STORE_BYTES}",
        "--include-log-monitor=false",
        "--no-monitor",
        "--disable-usage-stats",
    ]
    settings = {"RAY_START_HOOK": f"{__name__}.{listen_on_loopback.__name__}", NICENESS: "0"}
    node = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=os.environ | settings
    )
    assert node.stdout is not None
    for line in node.stdout:
        if _READY in line:
            return
        print(line, end="", file=sys.stderr)
    raise DeviceError(f"`ray start` ended with exit status {node.wait()}")


def listen_on_loopback(parameters: Any, _head: bool) -> None:
    """Called by ``ray start`` before it starts a node: let the node listen on loopback alone, and end with the keeper.

    The option ``--node-ip-address`` replaces loopback by an address that other machines reach.
    """
    parameters.node_ip_address = LOOPBACK
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


@contextlib.contextmanager
def _killed_at_the_end() -> Iterator[None]:
    """Kill all processes that this one and its children started in a block, and wait for their end."""
    try:
        yield
    finally:
        started = psutil.Process().children(recursive=True)
        for process in started:
            with contextlib.suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(started, KILL_S)


def _end_with_stdin() -> None:
    sys.stdin.read()
    os.kill(os.getpid(), signal.SIGTERM)
