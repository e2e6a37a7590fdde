"""Measure the links between devices: the runtime's own ring between two pinned workers, and between the host and each.

Both ends measure their own share of a transfer (``link_ends``). The rest of half a round trip is latency: the time to wake a
process that waits. The overhead of a request beside its bytes is measured in a pipeline (``request_overhead``).
"""

import statistics
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import combinations, permutations

import numpy as np

from autosplit.devices.accelerators import is_accelerator
from autosplit.measuring.link_ends import SIZES_BYTES, LinkEnd, OnCores, play
from autosplit.measuring.measuring_worker import MeasuringWorker, Workers
from autosplit.measuring.request_overhead import RequestOverhead, measure_request_overhead
from autosplit.running.ring import Ring
from autosplit.tracing.tensorspec import TensorSpec
from autosplit.values.links import Link
from autosplit.values.machine import HOST, Device

MESSAGES = (60, 60, 40, 20)
"""Messages of each of ``SIZES_BYTES`` that are timed in each direction of a link."""

MAX_DEVICES = 6
"""Links are measured between at most this many devices; the others take the median of similar pairs."""


@dataclass(frozen=True)
class LinkRings:
    """Two rings for each pair of devices and host, by their names; ``devices``: all, those that are measured first."""

    devices: Sequence[Device]
    rings: Mapping[tuple[str, str], tuple[Ring, Ring]]

    def fds(self, device: str) -> list[int]:
        """The descriptors that a worker on the device inherits."""
        return [fd for pair, rings in self.rings.items() if device in pair for ring in rings for fd in ring.handle.fds]

    def without(self, names: Collection[str]) -> "LinkRings":
        """Those between other devices."""
        devices = [device for device in self.devices if device.name not in names]
        return LinkRings(devices, {pair: rings for pair, rings in self.rings.items() if not {*names} & {*pair}})


@contextmanager
def open_rings(devices: Sequence[Device]) -> Iterator[LinkRings]:
    """Rings between the host and the first ``MAX_DEVICES`` CPU core sets and accelerators."""
    there = [device for device in devices if is_accelerator(device)]
    cores = [device for device in devices if device.kind == "cpu"]
    # Accelerators come first: cores are like each other, and the links of accelerators are not. Two cores show those of all.
    num_first = MAX_DEVICES - min(2, len(cores))
    usable = [*there[:num_first], *cores, *there[num_first:]]
    names = [HOST, *(device.name for device in usable[:MAX_DEVICES])]
    spec = TensorSpec("payload", (SIZES_BYTES[-1] // 4,), (1,), "float32")
    with ExitStack() as stack:

        def ring() -> Ring:
            found = Ring.create([[spec]], num_slots=2)
            stack.callback(found.close)
            return found

        yield LinkRings(usable, {pair: (ring(), ring()) for pair in combinations(names, 2)})


def measure_links(opened: LinkRings, workers: Workers, others: Sequence[Device] = ()) -> list[Link]:
    """Links for every ordered pair of devices, and between each of them and the host.

    On an accelerator the data begins and ends in its memory, so its share holds the copy through staging memory.

    Args:
        workers: idle workers that inherited ``opened.fds``.
        others: further devices, whose links are taken to be similar.
    Returns: links with ``a + bytes * b`` seconds for each share, fitted to the medians by relative least squares; ``a`` is at
        least the overhead of a request in a pipeline.
    Raises: WorkerError: a worker died or failed.
    """
    links: list[Link] = []
    for (one, other), (forth, back) in opened.rings.items():
        links += [_link(one, other, forth, back, workers), _link(other, one, back, forth, workers)]
    everything = [*opened.devices, *others]
    kinds = {device.name: device.kind for device in everything}
    links += _similar_links(links, {HOST: HOST, **kinds})
    cores = [device for device in opened.devices if device.kind == "cpu"]
    if cores:
        warm, cold = measure_request_overhead(cores[:MAX_DEVICES])
        names = {device.name for device in everything if device.kind == "cpu"}
        links = [with_overhead(link, names, warm, cold) for link in links]
    there = [device.name for device in opened.devices if is_accelerator(device)]
    pinned: dict[str, float] = {}
    for name in there:  # one after the other: several may share a bus, which a machine file states
        pinned |= workers.call(MeasuringWorker.pinned_s_per_byte, {name: ()})
    return [replace(one, pinned_s_per_byte=pinned.get(one.target, 0.0)) if one.source == HOST else one for one in links]


def fit(sizes_bytes: Sequence[int], seconds: Sequence[float]) -> tuple[float, float]:
    """Fixed seconds and seconds a byte, both at least 0, with the least squares of the relative errors.

    >>> [round(value, 9) for value in fit([0, 1000, 2000], [1e-3, 2e-3, 3e-3])]
    [0.001, 1e-06]
    """
    times = np.maximum(np.asarray(seconds), 1e-9)
    slope, fixed = np.polyfit(np.asarray(sizes_bytes, float), times, 1, w=1 / times)
    if slope < 0:
        return float(np.median(times)), 0.0
    if fixed < 0:
        return 0.0, float(np.median(times / np.maximum(np.asarray(sizes_bytes, float), 1)))
    return float(fixed), float(slope)


def with_overhead(link: Link, cores: Collection[str], warm: RequestOverhead, cold: RequestOverhead) -> Link:
    """The link with fixed shares that are at least the overhead of a request in a pipeline.

    A worker's overhead is shared between taking the request and handing it on. The host's is charged where it takes answers.

    Args:
        link: as the ring alone is.
        cores: names of the devices that are CPU cores.
        warm: the overhead with warm caches.
        cold: the overhead with stages that sweep them.
    """
    if link.source in cores:
        link = replace(link, send_s=max(link.send_s, warm.worker_s / 2), cold_send_s=cold.worker_s / 2)
    if link.target in cores:
        link = replace(link, receive_s=max(link.receive_s, warm.worker_s / 2), cold_receive_s=cold.worker_s / 2)
    if link.target == HOST:
        link = replace(link, receive_s=max(link.receive_s, warm.host_s), cold_receive_s=cold.host_s)
    return link


def _link(source: str, target: str, forth: Ring, back: Ring, workers: Workers) -> Link:
    """Let both ends play, the host its own, and fit their times."""
    forth.refill()
    back.refill()
    receiver = LinkEnd("receive", forth.handle, back.handle, MESSAGES)
    ends = {target: receiver, source: replace(receiver, role="send")}
    calls = workers.begin(MeasuringWorker.play, {name: (end,) for name, end in ends.items() if name != HOST})
    found = {HOST: play(ends[HOST], OnCores(), (forth, back))} if HOST in ends else {}
    found |= workers.results(calls)
    sent, received = found[source], found[target]
    send_s, send_s_per_byte = fit(SIZES_BYTES, sent.share_s)
    receive_s, receive_s_per_byte = fit(SIZES_BYTES, received.share_s)
    # The token costs as much as a small message, so half of the small round trip is one way.
    latency_s = max(0.0, sent.round_s[0] / 2 - sent.share_s[0] - received.share_s[0])
    return Link(source, target, latency_s, send_s, send_s_per_byte, receive_s, receive_s_per_byte)


def _similar_links(links: Sequence[Link], kinds: Mapping[str, str]) -> list[Link]:
    """Links for the pairs that were not measured: the median of those between the same kinds, or else between all devices."""
    measured = {(link.source, link.target) for link in links}
    between: dict[tuple[str, str], list[Link]] = {}
    for link in links:
        between.setdefault((kinds[link.source], kinds[link.target]), []).append(link)
    inner = [link for link in links if HOST not in (link.source, link.target)]
    costs = ("latency_s", "send_s", "send_s_per_byte", "receive_s", "receive_s_per_byte")
    found = []
    for source, target in permutations(kinds, 2):
        if (source, target) not in measured:
            same = between.get((kinds[source], kinds[target]), inner) or links
            medians = {cost: statistics.median(getattr(link, cost) for link in same) for cost in costs}
            found.append(Link(source, target, **medians))
    return found
