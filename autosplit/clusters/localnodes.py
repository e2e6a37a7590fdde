"""Ray nodes on this machine, for trying a cluster out. A process of its own keeps them.

Ray's classes for several nodes on one machine (``ray.cluster_utils``) are its own test tools. Only ``keep`` uses them.
"""

import contextlib
import os
import re
import secrets
import signal
import string
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from unittest import mock

from autosplit.children import python_running
from autosplit.compat.raysettings import reread_settings
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

MAX_LOCAL = 16
START_S, ENDING_S = 120.0, 20.0
SOCKET_PATH_BYTES = 107
"""Longest path of a Unix socket on Linux."""

SHOWN_LINES = 8
"""Last lines of the output of failed nodes that the error shows."""

_ADDRESS = "address of the first node: "
_IS_ERROR = re.compile(r"\[[^]]* [EFC] ")
"""Start of a line of a log of Ray: the time, and the severity error, fatal or check failed."""


@contextlib.contextmanager
def local_nodes(count: int) -> Iterator[str]:
    """Start nodes on this machine that listen on loopback alone, and yield the address of the first.

    A process of its own keeps them, and ends all of their processes when this one ends, however it ends.

    Raises: DeviceError: the nodes did not start; the message has the end of their output.
    """
    _require_short_paths()
    import ray._private.ray_constants as constants

    with own_token(), tempfile.TemporaryFile() as output, mock.patch.object(constants, "ENABLE_RAY_CLUSTER", new=False):
        keeper = subprocess.Popen(
            python_running(f"from autosplit.clusters.localnodes import keep; keep({count})"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=output,
            text=True,
            process_group=0,
        )
        with keeper:
            assert keeper.stdin is not None and keeper.stdout is not None
            try:
                address = next((line for line in iter(keeper.stdout.readline, "") if line.startswith(_ADDRESS)), "")
                if not address:
                    output.seek(0)
                    lines = output.read().decode(errors="replace").splitlines()[-SHOWN_LINES:]
                    end = "\n    ".join(["their output ends with:", *lines]) if lines else "they wrote nothing"
                    raise DeviceError(f"{count} Ray nodes could not be started on this machine; {end}")
                yield address.removeprefix(_ADDRESS).strip()
            finally:
                keeper.stdin.close()
                try:
                    keeper.wait(ENDING_S)  # after Ctrl-C, the end of the block would not wait
                except subprocess.TimeoutExpired:
                    os.killpg(keeper.pid, signal.SIGKILL)


def _require_short_paths() -> None:
    """Raises: DeviceError: the paths of the nodes' sockets would be too long."""
    parent = tempfile.gettempdir()
    inside = Path(f"autosplit-{os.getuid()}-scratch") / "tmp12345678" / _socket_names(MAX_LOCAL - 1)["plasma_store_socket_name"]
    num_bytes, most = len(os.fsencode(parent)), SOCKET_PATH_BYTES - len(f"/{inside}")
    if num_bytes > most:
        raise DeviceError(
            f"'{parent}' is too long for the sockets of local Ray nodes: it has {num_bytes} bytes, and at most {most} fit. "
            "Set TMPDIR to a folder with a shorter path, such as /tmp."
        )


def _socket_names(number: int) -> dict[str, str]:
    """Short names of the sockets of a node; the names that Ray gives by itself leave 5 bytes for the path of the folder."""
    return {"plasma_store_socket_name": f"plasma{number}", "raylet_socket_name": f"raylet{number}"}


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
    """The process that keeps local nodes: start them, write the address of the first, and end them as soon as stdin ends.

    Each node has its share of the cores; where there are fewer cores than nodes, nodes share them.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that wants the nodes
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    threading.Thread(target=_end_with_stdin, daemon=True).start()
    try:
        with scratch_folder() as folder, contextlib.ExitStack() as started:
            # Ray writes the address of its newest cluster to a file for ``auto``; that of these nodes must not go there.
            (folder / "ray").mkdir()
            os.environ |= {"RAY_TMPDIR": str(folder), NICENESS: "0"}
            try:
                print(f"{_ADDRESS}{_start(count, folder, started)}", flush=True)
            except Exception:
                _show_errors(folder / "session_latest" / "logs")  # before they are removed
                raise
            threading.Event().wait()
    except Exception as failure:
        print(f"{type(failure).__name__}: {failure}", file=sys.stderr, flush=True)
    finally:
        os.killpg(0, signal.SIGKILL)


def _start(count: int, folder: Path, started: contextlib.ExitStack) -> str:
    """Start nodes, which end with ``started``, and return the address of the first. Raises: Exception: whatever Ray raises."""
    import ray._private.ray_constants as constants
    from ray.cluster_utils import Cluster

    # Ray would replace 127.0.0.1 by an address that other machines reach, and listen there.
    constants.ENABLE_RAY_CLUSTER = False
    cores = affinity()
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
            **{name: str(folder / socket) for name, socket in _socket_names(number).items()},
        )
    os.sched_setaffinity(0, cores)
    cluster.wait_for_nodes(START_S)
    return str(cluster.address)


def _show_errors(logs: Path) -> None:
    """Write the errors in the logs of nodes to stderr."""
    for path in sorted(path for kind in ("gcs_server", "raylet") for path in logs.glob(f"{kind}*")):
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
        for line in lines if path.suffix == ".err" else filter(_IS_ERROR.match, lines):
            print(line, file=sys.stderr)


def _end_with_stdin() -> None:
    sys.stdin.read()
    os.kill(os.getpid(), signal.SIGTERM)
