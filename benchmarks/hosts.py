"""Transports between two hosts, 4 KB to 64 MB: Ray object references, gloo, ours, and a bare socket as the limit.

Two Ray nodes on this machine; a tensor goes from one node to the other and a word comes back. All transports take turns in
each round, and the median round trip of each size is written to ``hosts.md``. Run with ``make bench-hosts``.
"""

import os
import queue
import socket
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from autosplit.clusters.frames import CANCEL, REQUEST, Connection, Frame, Outgoing, Receiver, Slot, receive_into
from autosplit.clusters.raynodes import Agents, connected
from autosplit.commands.console import say
from autosplit.devices.discovering import cpu_name
from autosplit.tables import bytes_text, seconds_text
from autosplit.tracing.tensorspec import spec_of

SIZES = (4 << 10, 64 << 10, 1 << 20, 16 << 20, 64 << 20)
ROUNDS, TRIPS = 5, 8
WAYS = ("bare socket", "ours", "gloo", "ray object references")


class Peer(Receiver):
    """One end of all transports; the first peer sends, the second one answers."""

    def __init__(self, name: str, address: str, store: tuple[str, int]) -> None:
        self._address, self._store = address, store
        self._words: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._connections: dict[int, Connection] = {}
        self._bare: socket.socket | None = None
        self._other: Any = None

    def listen(self) -> tuple[str, int]:
        """Open a port for ``dial`` of the other peer."""
        self._listener = socket.create_server((self._address, 0))
        return self._listener.getsockname()  # type: ignore[no-any-return]

    def accept(self) -> None:
        """Take the other peer's connections: a bare one, and one of ours for each size."""
        self._bare = self._listener.accept()[0]
        for size in SIZES:
            self._connections[size] = Connection(self._listener.accept()[0], "first", self, [_spec(size)], num_slots=4)

    def dial(self, address: tuple[str, int], other: Any) -> None:
        """Connect to the other peer."""
        self._other = other
        self._bare = _connected(address)
        for size in SIZES:
            self._connections[size] = Connection(_connected(address), "second", self, [_spec(size)], num_credits=4)

    def join(self, rank: int) -> None:
        """Join the process group of gloo."""
        store = dist.TCPStore(self._store[0], self._store[1], 2, is_master=rank == 0)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=2)

    def request(self, connection: Connection, frame: Frame, slot: Slot) -> None:
        """The second peer: a word for each tensor."""
        connection.release(slot)
        connection.post(Outgoing(CANCEL, frame.number))

    def cancel(self, connection: Connection, frame: Frame) -> None:
        """The first peer: the word."""
        self._words.put(frame.number)

    def take(self, value: torch.Tensor) -> int:
        """The second peer, for Ray: the tensor came."""
        return len(value)

    def answer(self, way: str, size: int, count: int) -> None:
        """The second peer: answer ``count`` tensors of a way that needs somebody who waits."""
        value, word = torch.zeros(size, dtype=torch.uint8), torch.zeros(1)
        for _ in range(count):
            if way == "gloo":
                dist.recv(value, 0)
                dist.send(word, 0)
            else:
                assert self._bare is not None
                receive_into(self._bare, value.numpy().data)
                self._bare.sendall(b"1234")

    def trips(self, way: str, size: int, count: int) -> list[float]:
        """The first peer: seconds of each round trip."""
        import ray

        value, word, short = torch.zeros(size, dtype=torch.uint8), torch.zeros(1), memoryview(bytearray(4))
        connection, bare = self._connections[size], self._bare
        assert bare is not None

        def ours() -> None:
            connection.post(Outgoing(REQUEST, 1, tensors=[value]))
            self._words.get()

        def gloo() -> None:
            dist.send(value, 1)
            dist.recv(word, 1)

        def socket_alone() -> None:
            bare.sendall(value.numpy().data)
            receive_into(bare, short)

        def references() -> None:
            ray.get(self._other.take.remote(ray.put(value)))

        trip: Callable[[], None] = dict(zip(WAYS, (socket_alone, ours, gloo, references), strict=True))[way]
        found = []
        for _ in range(count):
            start = time.perf_counter()
            trip()
            found.append(time.perf_counter() - start)
        return found


def _spec(size: int) -> Any:
    return spec_of("value", torch.zeros(size, dtype=torch.uint8))


def _connected(address: tuple[str, int]) -> socket.socket:
    sock = socket.create_connection(address)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sock


def measure() -> dict[tuple[str, int], list[float]]:
    """Way and size to the seconds of its round trips, over all rounds."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        store = free.getsockname()
    found: dict[tuple[str, int], list[float]] = {(way, size): [] for way in WAYS for size in SIZES}
    with connected("local:2") as nodes:
        peers = Agents(nodes, Peer, store)
        first, second = (node.name for node in nodes)
        [address] = peers.ask([(second, "listen")])
        peers.ask([(second, "accept"), (first, "dial", address, peers.handle(second))])
        peers.ask([(first, "join", 0), (second, "join", 1)])
        for number in range(ROUNDS):
            for size in SIZES:
                for way in WAYS[number % len(WAYS) :] + WAYS[: number % len(WAYS)]:
                    calls = [(first, "trips", way, size, TRIPS)]
                    if way in ("gloo", "bare socket"):
                        calls.append((second, "answer", way, size, TRIPS))
                    found[way, size] += peers.ask(calls)[0][1:]
            say(f"round {number + 1} of {ROUNDS}")
        peers.kill()
    return found


def page(found: dict[tuple[str, int], list[float]]) -> str:
    """The table as a page."""
    lines = [
        "# Transports between two hosts",
        "",
        f"`make bench-hosts` made this table with two Ray nodes on one machine ({cpu_name()}), over loopback. A tensor goes "
        f"there and a word comes back. Figures are medians of {ROUNDS * (TRIPS - 1)} round trips; all transports ran in "
        "interleaved rounds. *Bare socket* is `sendall` and `recv_into` with a thread that waits at each end, which is the limit "
        "for any transport in Python. A ratio above 1 says that ours is faster. "
        f"Load average at the end: {os.getloadavg()[0]:.0f} on {os.cpu_count()} cores.",
        "",
        f"| size | {' | '.join(WAYS)} | ours, of the bare socket | ours against gloo | ours against Ray |",
        f"|---|{'---|' * (len(WAYS) + 3)}",
    ]
    for size in SIZES:
        medians = {way: statistics.median(found[way, size]) for way in WAYS}
        ratios = [medians[way] / medians["ours"] for way in ("bare socket", "gloo", "ray object references")]
        cells = [bytes_text(size), *(seconds_text(medians[way]) for way in WAYS), *(f"{ratio:.2f}" for ratio in ratios)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    text, path = page(measure()), Path(__file__).parent / "hosts.md"
    others = path.read_text(encoding="utf-8").partition("\n## ")  # the sections below are written by hand
    path.write_text(text + "".join(others[1:]), encoding="utf-8")
    print(text)
