"""Links between devices and wires between hosts: the time that a value takes from one to another."""

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
    """A network card or an uplink, which values between hosts share: it carries their bytes one after the other.

    Every value from one of ``sources`` to another host among ``targets`` occupies it for ``s_per_byte`` seconds a byte. The ends
    are names of hosts, or ``host`` for the host of the calling process. A card is two wires, one for each direction.
    """

    name: str
    sources: tuple[str, ...]
    targets: tuple[str, ...]
    s_per_byte: float


def shared_memory_link(source: str, target: str) -> Link:
    """The assumed cost of a ring that was not measured: 35 us latency, 2 us and 50 GB/s to send, 2 us to receive a view."""
    return Link(source, target, latency_s=35e-6, send_s=2e-6, send_s_per_byte=2e-11, receive_s=2e-6, receive_s_per_byte=0.0)
