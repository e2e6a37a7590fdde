"""Ray nodes in network namespaces of this machine, joined by a bridge, with a limit on what each card sends and takes.

It needs root, ``unshare`` (util-linux), ``ip`` and ``tc`` (iproute2), and the rights to make namespaces. If a machine does not
allow it, ``namespaces`` says which command failed and why. ``python -m benchmarks.namespaces HOSTS MBIT_PER_S`` shows what a
cluster measures there.
"""

import contextlib
import os
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

import autosplit
from autosplit.clusters.localnodes import LABEL, NICENESS
from autosplit.commands.console import say
from autosplit.devices.limits import affinity
from autosplit.errors import DeviceError

BRIDGE, NETWORK, PORT = "autosplitbr", "10.77.29", 6399
DRIVER = f"{NETWORK}.254"


INSIDE, OWN_FILES = "AUTOSPLIT_BENCHMARK_INSIDE", "/run/netns"


def contain() -> None:
    """Start this program again with a network, files and processes of its own, unless it runs so already.

    The kernel ends all of them with the program, however that ends. A killed benchmark left a bridge, which stopped the next one,
    and folders in ``/tmp``. Namespaces have their names in ``/run/netns``; a file system in memory hides that folder, and
    temporary files go there too. Shared memory is its own as well, because Ray leaves files there.

    Raises: DeviceError: this machine does not allow it.
    """
    if INSIDE not in os.environ:
        apart = ["unshare", "--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
        prepare = f'mount -t tmpfs tmpfs {OWN_FILES} && mount -t tmpfs tmpfs /dev/shm && ip link set lo up && exec "$@"'
        command(*apart, "true")
        Path(OWN_FILES).mkdir(exist_ok=True)
        os.environ |= {INSIDE: "1", "TMPDIR": OWN_FILES}
        os.execvp(apart[0], [*apart, "sh", "-c", prepare, "sh", sys.executable, *sys.orig_argv[1:]])


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


@dataclass(frozen=True)
class Space:
    """A host in a namespace: its number, its core, and the folder that all processes of the cluster name."""

    number: int
    core: int
    folder: Path

    @property
    def name(self) -> str:
        """The name of the namespace."""
        return f"autosplit-{name_of(self.number)}"

    @property
    def address(self) -> str:
        """The address on which it listens."""
        return f"{NETWORK}.{self.number + 1}"

    def start(self) -> None:
        """Start its Ray node; a node that was killed may be started again."""
        prefix = ["ip", "netns", "exec", self.name, "taskset", "-c", str(self.core)]
        _start(prefix, [f"--address={DRIVER}:{PORT}"], self.address, 1, self.folder, f'{{"{LABEL}": "{name_of(self.number)}"}}')


@contextlib.contextmanager
def namespaces(mbit_per_s: Sequence[float], folder: Path) -> Iterator[tuple[str, list[Space]]]:
    """Start a Ray node for each limit, each in a namespace of its own; yield the address of the cluster, and the namespaces.

    This process is on the head, a node without processors, because Ray takes a driver without a node of its own to be there.
    The card of a host sends and takes at most as much as its limit says; that of this process has none.

    Raises: DeviceError: this machine does not allow it.
    """
    os.environ |= {"RAY_AUTH_MODE": "token", NICENESS: "0"}
    os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))  # Ray reads it once in a process
    cores = affinity()
    spaces = [Space(number, cores[number % len(cores)], folder) for number in range(len(mbit_per_s))]
    with contextlib.ExitStack() as made:
        command("ip", "link", "add", BRIDGE, "type", "bridge")
        made.callback(_quietly, "ip", "link", "del", BRIDGE)
        command("ip", "addr", "add", f"{DRIVER}/24", "dev", BRIDGE)
        command("ip", "link", "set", BRIDGE, "up")
        made.callback(_end, folder)
        for space in spaces:
            card = f"autosplit{space.number}"
            command("ip", "netns", "add", space.name)
            made.callback(_quietly, "ip", "netns", "del", space.name)
            command("ip", "link", "add", card, "type", "veth", "peer", "name", "eth0", "netns", space.name)
            made.callback(_quietly, "ip", "link", "del", card)
            command("ip", "link", "set", card, "master", BRIDGE, "up")
            for words in (f"addr add {space.address}/24 dev eth0", "link set eth0 up", "link set lo up"):
                command("ip", "-n", space.name, *words.split())
            limit = f"root tbf rate {mbit_per_s[space.number]:g}mbit burst 256kb latency 200ms".split()
            command("tc", "qdisc", "add", "dev", card, *limit)
            command("ip", "netns", "exec", space.name, "tc", "qdisc", "add", "dev", "eth0", *limit)
        _start([], ["--head", f"--port={PORT}"], DRIVER, 0, folder, "{}")
        for space in spaces:
            space.start()
        yield f"{DRIVER}:{PORT}", spaces


def _start(prefix: Sequence[str], where: Sequence[str], address: str, cpus: int, folder: Path, labels: str) -> None:
    ray, store = str(Path(sys.executable).with_name("ray")), f"--object-store-memory={96 << 20}"
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
        namespaces([mbit_per_s] * count, Path(folder)) as (address, _),
        autosplit.Cluster(address) as cluster,
    ):
        for wire in cluster.machine.wires:
            say(f"{wire.name}: {8e-6 / wire.s_per_byte:.4g} Mbit/s")


if __name__ == "__main__":
    contain()
    main(int(sys.argv[1]), float(sys.argv[2]))
