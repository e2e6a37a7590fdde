"""Measure the connections between hosts: latency and bandwidth of each, and bandwidth of a host's card over all of them.

One end sends a payload, the other answers with a word once all of it is there. Half of the shortest round trip is the latency of
one way. The bandwidth is that between two large payloads: a network may let the first 100 KB or so of a burst pass at once.
Connections that share a card or an uplink are found by flooding them side by side.
"""

import contextlib
import socket
import struct
import time
from collections.abc import Iterator, Mapping
from statistics import median

from autosplit.clusters.sockets import reason_of, receive_into
from autosplit.errors import WorkerError
from autosplit.values.links import Link, Wire

SMALL_BYTES, MEDIUM_BYTES, LARGE_BYTES = 4096, 1 << 20, 4 << 20
NUM_TRIPS, PAIR_S = 15, 0.25
"""Most round trips of each size, and most seconds for each size; at least three are made."""

SLOW_S = 0.5
"""Seconds of a round trip with the medium payload from which on the large one is not sent: below 17 Mbit/s."""

ANSWER_S = 60.0
"""Seconds within which a payload must be there; several connections may share a slow card."""

_WORD = struct.Struct("<Q")
_END = 0


def measure_link(source: str, target: str, sock: socket.socket) -> tuple[Link, Wire]:
    """The latency from this host to the other end of a connection, which is closed then, and the wire between the two.

    The bytes occupy neither device: the agents of the hosts send and take them.

    Raises: WorkerError: the connection broke.
    """
    with _probing(sock):
        small, medium = (_trips_s(sock, num_bytes) for num_bytes in (SMALL_BYTES, MEDIUM_BYTES))
        if min(medium) < SLOW_S:
            s_per_byte = (median(_trips_s(sock, LARGE_BYTES)) - median(medium)) / (LARGE_BYTES - MEDIUM_BYTES)
        else:
            s_per_byte = (median(medium) - median(small)) / (MEDIUM_BYTES - SMALL_BYTES)
    latency_s = max(1e-6, min(small)) / 2
    wire = Wire(f"{source} to {target}", (source,), (target,), max(1e-12, s_per_byte))
    return Link(source, target, latency_s, 0.0, 0.0, 0.0, 0.0), wire


def flood(sock: socket.socket) -> float:
    """Bytes a second that the other end of a connection takes, which is closed then. Raises: WorkerError: it broke."""
    with _probing(sock):
        num_bytes, trips_s = MEDIUM_BYTES, _trips_s(sock, MEDIUM_BYTES)
        if min(trips_s) < SLOW_S:
            num_bytes, trips_s = LARGE_BYTES, _trips_s(sock, LARGE_BYTES)
    return (len(trips_s) - 1) * num_bytes / sum(trips_s[1:])  # a burst may pass at once in the first one


@contextlib.contextmanager
def _probing(sock: socket.socket) -> Iterator[None]:
    """Use a connection for measurements, then close it. Raises: WorkerError: it broke."""
    with sock:
        try:
            address, port, *_ = sock.getpeername()
            sock.settimeout(ANSWER_S)
            yield
            sock.sendall(_WORD.pack(_END))
        except OSError as failure:
            reason = reason_of(failure, ANSWER_S)
            raise WorkerError(f"the connection to {address}:{port} could not be measured: {reason}") from None


def cards(pairs: Mapping[tuple[str, str], Wire], sent_per_s: Mapping[str, float], taken_per_s: Mapping[str, float]) -> list[Wire]:
    """The wires of a cluster: the card of each host, one for each direction, and the pairs that are slower than their cards.

    Args:
        pairs: the wire of each ordered pair of hosts, measured alone.
        sent_per_s: bytes a second that a host sends over all its connections at once.
        taken_per_s: bytes a second that a host takes over all its connections at once.
    """
    hosts = tuple(dict.fromkeys(host for pair in pairs for host in pair))
    found = {}
    for host in hosts:
        out = min([wire.s_per_byte for pair, wire in pairs.items() if pair[0] == host] + _each_s(sent_per_s.get(host)))
        into = min([wire.s_per_byte for pair, wire in pairs.items() if pair[1] == host] + _each_s(taken_per_s.get(host)))
        found[host] = Wire(f"{host} sends", (host,), hosts, out), Wire(f"{host} receives", hosts, (host,), into)
    slower = [w for (a, b), w in pairs.items() if w.s_per_byte > max(found[a][0].s_per_byte, found[b][1].s_per_byte)]
    return [wire for card in found.values() for wire in card] + slower


def _each_s(bytes_per_s: float | None) -> list[float]:
    return [1 / bytes_per_s] if bytes_per_s else []


def answer_probe(sock: socket.socket) -> None:
    """The other end of ``measure_link``. Raises: OSError: the connection broke, or a payload is too large."""
    with sock:
        sock.settimeout(ANSWER_S)
        word, memory = memoryview(bytearray(_WORD.size)), memoryview(bytearray(LARGE_BYTES))
        while True:
            receive_into(sock, word)
            num_bytes = _WORD.unpack(word)[0]
            if num_bytes == _END:
                return
            if num_bytes > LARGE_BYTES:
                raise ConnectionError(f"it announced a payload of {num_bytes} bytes, and {LARGE_BYTES} are allowed")
            receive_into(sock, memory[:num_bytes])
            sock.sendall(word)


def _trips_s(sock: socket.socket, num_bytes: int) -> list[float]:
    """Seconds of each round trip: a payload there, its size back. Raises: OSError: the connection broke, or the size is wrong."""
    payload, size, word = bytes(num_bytes), _WORD.pack(num_bytes), memoryview(bytearray(_WORD.size))
    found: list[float] = []
    begun_s = time.perf_counter()
    while len(found) < 3 or (len(found) < NUM_TRIPS and time.perf_counter() - begun_s < PAIR_S):
        start_s = time.perf_counter()
        sock.sendall(size)
        sock.sendall(payload)
        receive_into(sock, word)
        if word != size:
            raise ConnectionError(f"it does not confirm the {num_bytes} bytes that it was sent")
        found.append(time.perf_counter() - start_s)
    return found
