"""Ray nodes in network namespaces of this machine, joined by a bridge, with a limit on what each card sends and takes.

It needs root, ``ip`` and ``tc`` (iproute2), and the rights to make namespaces. Where a machine does not allow it, ``namespaces``
says which command failed and why. ``python -m benchmarks.namespaces HOSTS MBIT_PER_S`` shows what a cluster measures there.
"""

import contextlib
import os
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil

import autosplit
from autosplit.clusters.localnodes import LABEL
from autosplit.commands.console import say
from autosplit.devices.limits import affinity
from autosplit.errors import DeviceError

BRIDGE, NETWORK, PORT = "autosplitbr", "10.77.29", 6399


def command(*words: str) -> str:
    """The output of a command. Raises: DeviceError: it failed, with what it said."""
    try:
        return subprocess.run(words, capture_output=True, text=True, check=True, timeout=120).stdout
    except (OSError, subprocess.SubprocessError) as failure:
        said = getattr(failure, "stderr", "") or str(failure)
        raise DeviceError(f"`{' '.join(words)}` failed here: {said.strip()[-300:]}") from None


def name_of(number: int) -> str:
    """The name of a host."""
    return f"node-{chr(ord('a') + number)}"


@contextlib.contextmanager
def namespaces(count: int, mbit_per_s: float, folder: Path) -> Iterator[str]:
    """Start ``count`` Ray nodes, each in a namespace of its own, and yield the address of the cluster.

    This process is on a node without processors. Each card sends and takes at most ``mbit_per_s``, this machine's own too.

    Raises: DeviceError: this machine does not allow it.
    """
    os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    ray, cores = str(Path(sys.executable).with_name("ray")), affinity()
    with contextlib.ExitStack() as made:
        command("ip", "link", "add", BRIDGE, "type", "bridge")
        made.callback(_quietly, "ip", "link", "del", BRIDGE)
        command("ip", "addr", "add", f"{NETWORK}.254/24", "dev", BRIDGE)
        command("ip", "link", "set", BRIDGE, "up")
        made.callback(_end, folder)
        for number in range(count):
            space, card = f"autosplit-{name_of(number)}", f"autosplit{number}"
            command("ip", "netns", "add", space)
            made.callback(_quietly, "ip", "netns", "del", space)
            command("ip", "link", "add", card, "type", "veth", "peer", "name", "eth0", "netns", space)
            made.callback(_quietly, "ip", "link", "del", card)
            command("ip", "link", "set", card, "master", BRIDGE, "up")
            for words in (f"addr add {NETWORK}.{number + 1}/24 dev eth0", "link set eth0 up", "link set lo up"):
                command("ip", "-n", space, *words.split())
            limit = f"root tbf rate {mbit_per_s:g}mbit burst 256kb latency 200ms".split()
            command("tc", "qdisc", "add", "dev", card, *limit)
            command("ip", "netns", "exec", space, "tc", "qdisc", "add", "dev", "eth0", *limit)
        for number in range(count):
            where = ["--head", f"--port={PORT}"] if number == 0 else [f"--address={NETWORK}.1:{PORT}"]
            core = cores[number % len(cores)]
            prefix = ["ip", "netns", "exec", f"autosplit-{name_of(number)}", "taskset", "-c", str(core)]
            _start(prefix, ray, where, f"{NETWORK}.{number + 1}", 1, folder, f'{{"{LABEL}": "{name_of(number)}"}}')
        _start([], ray, [f"--address={NETWORK}.1:{PORT}"], f"{NETWORK}.254", 0, folder, "{}")
        yield f"{NETWORK}.1:{PORT}"


def _start(prefix: Sequence[str], ray: str, where: Sequence[str], address: str, cpus: int, folder: Path, labels: str) -> None:
    store = f"--object-store-memory={96 << 20}"
    options = [f"--node-ip-address={address}", f"--num-cpus={cpus}", store, "--disable-usage-stats"]
    options += [f"--temp-dir={folder}", "--include-dashboard=false"] if where[0] == "--head" else []
    command(*prefix, ray, "start", *where, *options, f"--labels={labels}")


def _end(folder: Path) -> None:
    """End the processes of Ray that name this cluster's folder, and no others."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.pid != os.getpid() and any(str(folder) in word for word in process.cmdline()):
                process.kill()


def _quietly(*words: str) -> None:
    with contextlib.suppress(DeviceError):
        command(*words)


def main(count: int, mbit_per_s: float) -> None:
    """Print the wires of a cluster in namespaces."""
    with (
        tempfile.TemporaryDirectory(prefix="autosplit-ns-") as folder,
        namespaces(count, mbit_per_s, Path(folder)) as address,
        autosplit.Cluster(address) as cluster,
    ):
        for wire in cluster.machine.wires:
            say(f"{wire.name}: {8e-6 / wire.s_per_byte:.4g} Mbit/s")


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]))
