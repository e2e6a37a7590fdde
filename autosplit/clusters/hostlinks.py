"""Measure the connection between two hosts: its latency and its bandwidth, on the transport that carries tensors.

One end sends a payload, the other answers with a word once all of it is there. The time of a round trip is fitted as a fixed
part and a part per byte. Half of the fixed part is the latency of one way.
"""

import socket
import struct
import time

import numpy as np

from autosplit.clusters.frames import SILENCE_S, receive_into
from autosplit.values.machine import Link

SIZES_BYTES = (4096, 65536, 1 << 20, 4 << 20)
NUM_TRIPS, PAIR_S = 15, 0.25
"""Most round trips of each size, and most seconds for each size; at least three are made."""

_WORD = struct.Struct("<Q")
_END = 0


def measure_link(source: str, target: str, sock: socket.socket) -> Link:
    """The link from this host to the other end of a connection, which is closed then.

    Returns: a link whose sender is busy for the bytes and whose receiver is not: the other host's agent takes them.
    """
    with sock:
        sock.settimeout(SILENCE_S)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        trips_s = [_trip_s(sock, num_bytes) for num_bytes in SIZES_BYTES]
        sock.sendall(_WORD.pack(_END))
    s_per_byte, fixed_s = np.polyfit(SIZES_BYTES, trips_s, 1, w=1 / np.asarray(trips_s))
    latency_s = float(max(1e-6, min(fixed_s, trips_s[0]))) / 2
    return Link(source, target, latency_s, 0.0, max(1e-12, float(s_per_byte)), 0.0, 0.0)


def answer_probe(sock: socket.socket) -> None:
    """The other end of ``measure_link``. Raises: OSError: the connection broke."""
    with sock:
        sock.settimeout(SILENCE_S)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        word, memory = memoryview(bytearray(_WORD.size)), memoryview(bytearray(SIZES_BYTES[-1]))
        while True:
            receive_into(sock, word)
            num_bytes = _WORD.unpack(word)[0]
            if num_bytes == _END or num_bytes > SIZES_BYTES[-1]:
                return
            receive_into(sock, memory[:num_bytes])
            sock.sendall(word)


def _trip_s(sock: socket.socket, num_bytes: int) -> float:
    """Fewest seconds of a payload there and a word back: other processes make single trips longer."""
    payload, word = bytes(num_bytes), memoryview(bytearray(_WORD.size))
    found: list[float] = []
    begun_s = time.perf_counter()
    while len(found) < 3 or (len(found) < NUM_TRIPS and time.perf_counter() - begun_s < PAIR_S):
        start_s = time.perf_counter()
        sock.sendall(_WORD.pack(num_bytes))
        sock.sendall(payload)
        receive_into(sock, word)
        found.append(time.perf_counter() - start_s)
    return min(found)
