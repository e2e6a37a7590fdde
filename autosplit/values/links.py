"""Links between devices, and wires that links share: the time that a value takes from one to another."""

from collections.abc import Collection
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Link:
    """Seconds to hand bytes from one device to another, with a fixed part and a part per byte for sender and receiver.

    Sending occupies the source, receiving the target. Latency occupies neither (a wake-up): it delays a request but costs no
    throughput. ``cold_send_s`` and ``cold_receive_s`` are the fixed parts if each request replaces the last-level cache, 0 if not
    measured. ``pinned_s_per_byte`` is the time for a byte of pinned memory of the host, which an accelerator copies by itself, as
    it does with streamed weights; 0 if not measured.
    """

    source: str
    target: str
    latency_s: float
    send_s: float
    send_s_per_byte: float
    receive_s: float
    receive_s_per_byte: float
    cold_send_s: float = 0.0
    cold_receive_s: float = 0.0
    pinned_s_per_byte: float = 0.0

    def when_cold(self) -> "Link":
        """The link of a model whose requests replace the last-level cache."""
        return replace(self, send_s=max(self.send_s, self.cold_send_s), receive_s=max(self.receive_s, self.cold_receive_s))

    def seconds(self, num_bytes: float) -> float:
        """One hop of ``num_bytes``, end to end, in seconds."""
        return self.latency_s + self.send_s + self.receive_s + num_bytes * (self.send_s_per_byte + self.receive_s_per_byte)


@dataclass(frozen=True, slots=True)
class Wire:
    """A network card, an uplink or a bus, which values share: it carries their bytes one after the other.

    Every value from one of ``sources`` to another end among ``targets`` occupies it for ``s_per_byte`` seconds a byte. The ends
    are names of hosts, or ``host`` for the host of the calling process. A card is two wires, one for each direction. The ends of
    a bus are names of devices of this machine, and ``host``; the weights that are streamed to a device pass it too.
    """

    name: str
    sources: tuple[str, ...]
    targets: tuple[str, ...]
    s_per_byte: float


def bus(devices: Collection[str], others: Collection[str], s_per_byte: float, peer_to_peer: bool = False) -> tuple[Wire, Wire]:
    """The bus of some accelerators, one wire for each direction.

    Args:
        others: the names of all other devices, whose values lie in the memory of the host.
        s_per_byte: seconds for a byte in one direction.
        peer_to_peer: whether values between two of the accelerators leave the bus alone; else they pass through the host.
    """
    name, inside = f"bus of {', '.join(devices)}", tuple(devices)
    outside = ("host", *others, *(() if peer_to_peer else inside))
    return Wire(f"{name} (in)", outside, inside, s_per_byte), Wire(f"{name} (out)", inside, outside, s_per_byte)


def shared_memory_link(source: str, target: str) -> Link:
    """The assumed cost of a ring that was not measured: 35 us latency, 2 us and 50 GB/s to send, 2 us to receive a view."""
    return Link(source, target, latency_s=35e-6, send_s=2e-6, send_s_per_byte=2e-11, receive_s=2e-6, receive_s_per_byte=0.0)
