"""Transports between two Ray nodes, 4 KB to 64 MB: ours, gloo, three ways of Ray, and a bare socket as the limit.

A tensor goes from one node to the other and a word comes back. All transports take turns in each round. A transport that does
not answer in ``LIMIT_S`` with a size, or raises, is left out for that size from then on, with its reason. ``make bench-hosts``
runs this module, on loopback and on a link of 1 Gbit/s.
"""

import os
import queue
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from autosplit.clusters.frames import CANCEL, REQUEST, Connection, Frame, Outgoing, Receiver, Slot
from autosplit.clusters.raynodes import Agents, Node, connected
from autosplit.clusters.sockets import receive_into
from autosplit.commands.console import say
from autosplit.tracing.tensorspec import spec_of
from benchmarks.peers import ROOM_BYTES, actor_on

SIZES = (4 << 10, 64 << 10, 1 << 20, 16 << 20, 64 << 20)
TRIPS, LARGE_BYTES, LARGE_TRIPS = 8, 16 << 20, 4
"""Round trips of a round for tensors below ``LARGE_BYTES`` and from there on; the first is not counted."""

LIMIT_S, MAX_TEXT = 30.0, 160
BARE, OURS, GLOO, REFERENCES = "bare socket", "ours", "gloo", "Ray object references"
GRAPH, DIRECT = "Ray compiled graph", "Ray direct transport"
WAYS = (BARE, OURS, GLOO, REFERENCES, GRAPH, DIRECT)
STREAM_BYTES, STREAM_WAYS = 64 << 20, (BARE, OURS)
UNASKED = 0
"""Number of a frame that is not answered."""


@dataclass
class Found:
    """What the rounds found: way and size to the seconds of round trips, bytes per second of streams, or the failure."""

    trips_s: dict[tuple[str, int], list[float]] = field(default_factory=dict)
    streams_bytes_per_s: dict[tuple[str, int], list[float]] = field(default_factory=dict)
    failures: dict[tuple[str, int], str] = field(default_factory=dict)


class Peer(Receiver):
    """One end of the transports that need no actors of their own; the first peer sends, the second one answers."""

    def __init__(self, name: str, address: str, card: str) -> None:
        os.environ["GLOO_SOCKET_IFNAME"] = card
        self._address = address
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
            self._connections[size] = Connection(self._listener.accept()[0], "first", self, [[_spec(size)]], num_slots=4)

    def dial(self, address: tuple[str, int], other: Any) -> None:
        """Connect to the other peer."""
        self._other = other
        self._bare = _connected(address)
        for size in SIZES:
            # cancellations, which are the words here, go to an end with slots alone
            self._connections[size] = Connection(_connected(address), "second", self, [[_spec(size)]], num_slots=1, num_credits=4)

    def store(self) -> int:
        """The first peer: open the store of gloo's group; return its port."""
        self._store = dist.TCPStore(self._address, 0, None, is_master=True)
        return self._store.port

    def join(self, rank: int, store: tuple[str, int]) -> None:
        """Join the process group of gloo."""
        dist.init_process_group("gloo", store=dist.TCPStore(*store, None, is_master=False), rank=rank, world_size=2)

    def request(self, connection: Connection, frame: Frame, slot: Slot) -> None:
        """The second peer: a word for each tensor that asks for one."""
        connection.release(slot)
        if frame.number != UNASKED:
            connection.post(Outgoing(CANCEL, frame.number))

    def cancel(self, connection: Connection, frame: Frame) -> None:
        """The first peer: the word."""
        self._words.put(frame.number)

    def take(self, value: torch.Tensor) -> int:
        """The second peer, for Ray: the tensor came."""
        return len(value)

    def answer(self, way: str, size: int, count: int, every: int = 1) -> None:
        """The second peer: take ``count`` tensors of a way that needs somebody who waits, and answer one of ``every``."""
        value, word = torch.zeros(size, dtype=torch.uint8), torch.zeros(1)
        for number in range(count):
            if way == GLOO:
                dist.recv(value, 0)
                dist.send(word, 0)
            else:
                assert self._bare is not None
                receive_into(self._bare, value.numpy().data)
                if (number + 1) % every == 0:
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

        trip = {BARE: socket_alone, OURS: ours, GLOO: gloo, REFERENCES: references}[way]
        return [seconds(trip) for _ in range(count)]

    def stream(self, way: str, size: int, count: int) -> float:
        """The first peer: send ``count`` tensors and wait for the word that the last one came; return the bytes per second."""
        value, connection, bare = torch.zeros(size, dtype=torch.uint8), self._connections[size], self._bare
        assert bare is not None

        def ours() -> None:
            for number in range(count):
                connection.post(Outgoing(REQUEST, UNASKED if number < count - 1 else 1, tensors=[value]))
            self._words.get()

        def socket_alone() -> None:
            for _ in range(count):
                bare.sendall(value.numpy().data)
            receive_into(bare, memoryview(bytearray(4)))

        return size * count / seconds(ours if way == OURS else socket_alone)


class RayEnd:
    """One end of Ray's compiled graph or direct transport."""

    def __init__(self, card: str) -> None:
        os.environ["GLOO_SOCKET_IFNAME"] = card

    def take(self, value: torch.Tensor) -> int:
        """The tensor came."""
        return len(value)

    def make(self, size: int) -> torch.Tensor:
        """A tensor to be sent."""
        return torch.zeros(size, dtype=torch.uint8)

    def trips(self, other: Any, size: int, count: int) -> list[float]:
        """Seconds of each round trip through a compiled graph that has the other end as its only actor.

        The channel has room for two tensors: with the ten that Ray takes by default, 16 MiB had no answer in two minutes.
        """
        import ray
        from ray.dag import InputNode

        with InputNode() as node:
            graph = other.take.bind(node)
        graph = graph.experimental_compile(_max_inflight_executions=2, _buffer_size_bytes=size + ROOM_BYTES)
        value = self.make(size)
        return [seconds(lambda: ray.get(graph.execute(value))) for _ in range(count)]


class Pair:
    """All transports from the first of two connected nodes to the second. ``card`` is the network interface of both."""

    def __init__(self, nodes: Sequence[Node], card: str) -> None:
        self._nodes, self._card = nodes, card
        self._first, self._second = (node.name for node in nodes)
        self._peers = Agents(nodes, Peer, card)
        [address] = self._peers.ask([(self._second, "listen")])
        self._peers.ask([(self._second, "accept"), (self._first, "dial", address, self._peers.handle(self._second))])
        store = nodes[0].address, self._peers.ask([(self._first, "store")])[0]
        self._peers.ask([(self._first, "join", 0, store), (self._second, "join", 1, store)])
        self._direct = self._ends(enable_tensor_transport=True)
        self._grouped = False

    def trips(self, way: str, size: int, count: int) -> list[float]:
        """Seconds of each round trip. Raises: Exception: the way failed, or gave no answer in ``LIMIT_S``."""
        if way == GRAPH:
            return self._graph_trips(size, count)
        if way == DIRECT:
            return self._direct_trips(size, count)
        calls = [(self._first, "trips", way, size, count)]
        if way in (GLOO, BARE):
            calls.append((self._second, "answer", way, size, count))
        return self._peers.ask(calls, LIMIT_S)[0]  # type: ignore[no-any-return]

    def stream(self, way: str, size: int) -> float:
        """Bytes per second of a stream of tensors."""
        count = STREAM_BYTES // size
        calls = [(self._first, "stream", way, size, count)]
        if way == BARE:
            calls.append((self._second, "answer", way, size, count, count))
        return self._peers.ask(calls, LIMIT_S)[0]  # type: ignore[no-any-return]

    def close(self) -> None:
        """End the actors."""
        self._peers.kill()
        _kill(self._direct)

    def _ends(self, **options: Any) -> list[Any]:
        return [actor_on(node, RayEnd, self._card, **options) for node in self._nodes]

    def _graph_trips(self, size: int, count: int) -> list[float]:
        """Both actors live for these trips only, because those of a compiled graph take a whole core each while they wait."""
        import ray

        first, second = ends = self._ends()
        try:
            return ray.get(first.trips.remote(second, size, count), timeout=LIMIT_S)  # type: ignore[no-any-return]
        finally:
            _kill(ends)

    def _direct_trips(self, size: int, count: int) -> list[float]:
        """This process asks for the trips, because a tensor of direct transport belongs to the process that made the actors."""
        import ray
        from ray.experimental.collective import create_collective_group

        if not self._grouped:
            create_collective_group(self._direct, backend="gloo")
            self._grouped = True
        first, second = self._direct
        make = first.make.options(tensor_transport="gloo")
        return [seconds(lambda: ray.get(second.take.remote(make.remote(size)), timeout=LIMIT_S)) for _ in range(count)]


def _kill(actors: Sequence[Any]) -> None:
    import ray

    for actor in actors:
        ray.kill(actor)


def first_line(failure: Exception) -> str:
    """The kind of a failure and the beginning of its text, for a cell of a table."""
    return f"{type(failure).__name__}: {failure}".partition("\n")[0][:MAX_TEXT].replace("|", "/")


def seconds(trip: Callable[[], Any]) -> float:
    """Seconds of a call."""
    begun_s = time.perf_counter()
    trip()
    return time.perf_counter() - begun_s


def _spec(size: int) -> Any:
    return spec_of("value", torch.zeros(size, dtype=torch.uint8))


def _connected(address: tuple[str, int]) -> socket.socket:
    sock = socket.create_connection(address)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sock


def measure(cluster: str, card: str, num_rounds: int, streams: bool = False) -> Found:
    """Round trips of all transports between the first two nodes of a cluster, and streams if they are asked for.

    The compiled graph comes last in each round, because the processes of its actors begin and end for each size.
    """
    found = Found()
    with connected(cluster) as nodes:
        pair = Pair(nodes[:2], card)
        for number in range(num_rounds):
            others = [way for way in WAYS if way != GRAPH]
            turn = number % len(others)
            for size in SIZES:
                for way in others[turn:] + others[:turn]:
                    _take_turn(pair, way, size, found)
                for way in STREAM_WAYS if streams else ():
                    found.streams_bytes_per_s.setdefault((way, size), []).append(pair.stream(way, size))
            for size in SIZES:
                _take_turn(pair, GRAPH, size, found)
            say(f"round {number + 1} of {num_rounds}")
        pair.close()
    return found


def _take_turn(pair: Pair, way: str, size: int, found: Found) -> None:
    """The round trips of a way and a size in one round, unless it has failed before."""
    count = TRIPS if size < LARGE_BYTES else LARGE_TRIPS
    if (way, size) not in found.failures:
        try:
            found.trips_s.setdefault((way, size), []).extend(pair.trips(way, size, count)[1:])
        except Exception as failure:
            found.failures[way, size] = first_line(failure)
