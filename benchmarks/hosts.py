"""Make the sections of ``hosts.md`` about transports, other systems and an idle cluster.

``python -m benchmarks.hosts [PART ...]`` makes those of ``loopback``, ``link``, ``idle``, and the models ``mobilenet`` and
``mlp``; by default all. ``link`` and the models need network namespaces; where a machine does not allow them, it says so, and the
other parts go on. ``make bench-hosts`` runs all parts.
"""

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import autosplit
from autosplit.commands.console import say
from autosplit.devices.discovering import cpu_name
from autosplit.errors import DeviceError
from autosplit.tables import bytes_text, seconds_text
from benchmarks import hostpeers, transports
from benchmarks.idle import IDLE_S, idle_s_per_min
from benchmarks.namespaces import contain, namespaces
from benchmarks.pages import table, with_section
from benchmarks.transports import BARE, GLOO, OURS, REFERENCES, SIZES, WAYS, Found

PAGE = Path(__file__).with_name("hosts.md")
NUM_IDLE_HOSTS, IDLE_TITLE = 3, "processor s a minute while idle"
SETTLE_S = 20.0
"""Seconds after which Ray's processes have started up."""

MODELS = ("mobilenet", "mlp")
IN_NAMESPACES = ("link", *MODELS)
LOOPBACK_ROUNDS, LINK_ROUNDS = 5, 3
PARTS = ("loopback", *IN_NAMESPACES, "idle")


def loopback() -> str:
    """The table of transports between two local nodes."""
    found = transports.measure("local:2", "lo", LOOPBACK_ROUNDS)
    rows = [[bytes_text(size), *_trips(found, size), *_ratios(found, size, (BARE, GLOO, REFERENCES))] for size in SIZES]
    return f"""# Transports between two hosts

`make bench-hosts` made this table with two Ray nodes on one machine, over loopback. A tensor goes there and a word comes back.
Figures are medians; all transports ran in {LOOPBACK_ROUNDS} interleaved rounds. *Bare socket* is `sendall` and `recv_into` with
a thread that waits at each end, which is the limit for any transport in Python. A third process asks for Ray's direct transport,
which adds two calls. A ratio above 1 says that ours is faster. {_machine()}

{table(["size", *WAYS, "bare socket / ours", "gloo / ours", "object references / ours"], rows)}"""


def link() -> str:
    """The table of transports and streams between two namespaces with limited cards."""
    with (
        tempfile.TemporaryDirectory(prefix="autosplit-ns-") as folder,
        namespaces([hostpeers.MBIT_PER_S] * 2, Path(folder)) as (address, _),
    ):
        found = transports.measure(address, hostpeers.CARD, LINK_ROUNDS, streams=True)
    rows, streams = [], []
    for size in SIZES:
        ours, bare = (statistics.median(found.streams_bytes_per_s[way, size]) for way in (OURS, BARE))
        added_s = _median(found, OURS, size) - _median(found, BARE, size)
        rows.append([bytes_text(size), *_trips(found, size), f"{added_s * 1e6:.0f} us"])
        streams.append([bytes_text(size), f"{ours * 8e-6:.0f} Mbit/s", f"{bare * 8e-6:.0f} Mbit/s", f"{ours / bare:.2f}"])
    return f"""## On a link of 1 Gbit/s

The same round trips between two network namespaces (`python -m benchmarks.hosts link`). `tc tbf` limits both cards, and lets
256 KB pass at once. The last column is what ours adds to a bare socket. Medians of {LINK_ROUNDS} rounds. {_machine()}

{table(["size", *WAYS, "added by ours"], rows)}

A stream of {bytes_text(transports.STREAM_BYTES)} in tensors of each size, until the last one came. The bare TCP stream measures
what `iperf3` does.

{table(["size", "ours", "bare TCP stream", "ours / bare"], streams)}"""


def peers(model: str) -> str:
    """The table of a model in two stages, through each system."""
    job, found = hostpeers.measure(model)
    base = statistics.median(found["autosplit"].per_s) if found["autosplit"].per_s else 0.0
    rows = []
    for way, one in found.items():
        rate = [""] * 4
        if one.per_s:
            middle = statistics.median(one.per_s)
            rate = [f"{middle:.4g}", f"{min(one.per_s):.4g}", f"{max(one.per_s):.4g}", f"{middle / base:.2f}" if base else ""]
        idle = f"{statistics.median(one.idle_s_per_min):.1f}" if one.idle_s_per_min else ""
        rows.append([way, *rate, idle, one.failure])
    return f"""### {model} in two stages

{job.description} Medians of {hostpeers.ROUNDS} rounds of about {hostpeers.ROUND_S:g} s. {_machine()}

{table(["way", "requests/s", "slowest round", "fastest round", "of autosplit", IDLE_TITLE, "left out because"], rows)}"""


def idle() -> str:
    """The table of the processor time of an idle cluster."""
    with autosplit.Cluster(f"local:{NUM_IDLE_HOSTS}"):
        time.sleep(SETTLE_S)
        used = idle_s_per_min()
    rows = [[name, str(count), f"{one_s:.2f}"] for name, (count, one_s) in used.items()]
    num_processes, all_s = sum(count for count, _ in used.values()), sum(one_s for _, one_s in used.values())
    return f"""## An idle cluster

`python -m benchmarks.hosts idle` opens a cluster of {NUM_IDLE_HOSTS} local nodes, waits for {SETTLE_S:g} s, and counts
for {IDLE_S:g} s, without requests. Its processes use {all_s:.1f} processor seconds a minute, {all_s / 60:.1%} of one core.
{_machine()}

{table(["process", "number", IDLE_TITLE], [*rows, ["all", str(num_processes), f"{all_s:.2f}"]])}"""


def _machine() -> str:
    return f"{os.cpu_count()} cores ({cpu_name()}), load average at the end {os.getloadavg()[0]:.1f}."


def _median(found: Found, way: str, size: int) -> float:
    return statistics.median(found.trips_s.get((way, size)) or [float("nan")])


def _trips(found: Found, size: int) -> list[str]:
    """The cell of each way: the median, or why it is left out."""
    return [found.failures.get((way, size)) or seconds_text(_median(found, way, size)) for way in WAYS]


def _ratios(found: Found, size: int, ways: Sequence[str]) -> list[str]:
    return [f"{_median(found, way, size) / _median(found, OURS, size):.2f}" for way in ways]


def main(parts: Sequence[str]) -> None:
    """Make the sections of these parts, each in a process of its own: Ray reads the token of a cluster once in a process."""
    if unknown := set(parts) - set(PARTS):
        sys.exit(f"'{', '.join(sorted(unknown))}' is none of {', '.join(PARTS)}")
    if len(parts) == 1:
        make(parts[0])
    else:
        sys.exit(max(subprocess.run([sys.executable, "-m", "benchmarks.hosts", part]).returncode for part in parts))


def make(part: str) -> None:
    """Make the section of a part; what this machine does not allow is left out, with the reason."""
    try:
        contain()
    except DeviceError as failure:
        if part in IN_NAMESPACES:
            say(f"{part} is left out: this machine does not allow network namespaces: {failure}")
            return
    try:
        section = peers(part) if part in MODELS else {"loopback": loopback, "link": link, "idle": idle}[part]()
    except DeviceError as failure:
        say(f"{part} is left out: {failure}")
        return
    PAGE.write_text(with_section(PAGE.read_text(encoding="utf-8"), section), encoding="utf-8")
    print(section, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:] or PARTS)
