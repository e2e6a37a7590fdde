"""Problem: a planner's question as numbers. Block: a part of an answer. No torch, no graph, no profile.

A problem has ops and devices, the seconds of each op on each device, nets (a value with its producer and its readers), the cost
of a transfer between each pair of devices for its sender and its receiver, and rules. An answer is a sequence of blocks: each
holds ops and the devices that run them; several devices are replicas of the block.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from autosplit.costs.wires import NO_WIRES, Wires
from autosplit.errors import UsageError, raise_faults
from autosplit.tables import bytes_text

HOST = -1
"""The calling process, which feeds and drains: an op in nets, a block, a device in transfer matrices (there the last index)."""

Floats = NDArray[np.float64]


def rows_of(pairs: Iterable[tuple[int, int]], num_rows: int) -> list[list[int]]:
    """For each row, the second ends of its pairs."""
    rows: list[list[int]] = [[] for _ in range(num_rows)]
    for row, entry in pairs:
        rows[row].append(entry)
    return rows


@dataclass(frozen=True, slots=True)
class Net:
    """A value: the op that makes it (HOST for an input), its readers (ops, and HOST for an output), and its bytes."""

    producer: int
    consumers: tuple[int, ...]
    num_bytes: float


def edges_of(nets: Iterable[Net]) -> tuple[tuple[int, int], ...]:
    """(maker, reader) of every value that an op makes and an op reads, each pair once, sorted."""
    return tuple(sorted({(net.producer, op) for net in nets for op in net.consumers if HOST not in (net.producer, op)}))


@dataclass(frozen=True, slots=True)
class SharedWeight:
    """Bytes that several ops read; a device that holds any of them holds the bytes once."""

    num_bytes: float
    users: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Pool:
    """Devices that share one memory of ``num_bytes``; bytes that several of them hold count once."""

    devices: tuple[int, ...]
    num_bytes: float


@dataclass(frozen=True)
class Transfers:
    """The cost of handing a value from one device to another, each array of shape (num_devices + 1, num_devices + 1).

    Row = sender, column = receiver, last index = the host. The sender is busy for ``send_s + bytes * send_s_per_byte``, the
    receiver for ``receive_s + bytes * receive_s_per_byte``; ``latency_s`` delays a sample and occupies neither. The
    diagonal is for two different blocks on one device.
    """

    send_s: Floats
    send_s_per_byte: Floats
    receive_s: Floats
    receive_s_per_byte: Floats
    latency_s: Floats

    @staticmethod
    def free(num_devices: int) -> "Transfers":
        """Transfers that cost nothing."""
        size = num_devices + 1
        return Transfers(*(np.zeros((size, size)) for _ in range(5)))

    def arrays(self) -> tuple[Floats, ...]:
        """The five arrays in the order of the fields."""
        return self.send_s, self.send_s_per_byte, self.receive_s, self.receive_s_per_byte, self.latency_s

    def sending_s(self, num_bytes: float | Floats) -> Floats:
        """Seconds that the sender of a value is busy, for each pair of devices."""
        return self.send_s + num_bytes * self.send_s_per_byte

    def receiving_s(self, num_bytes: float | Floats) -> Floats:
        """Seconds that the receiver of a value is busy, for each pair of devices."""
        return self.receive_s + num_bytes * self.receive_s_per_byte

    def alike(self, one: int, other: int) -> bool:
        """Whether all costs stay as they are when two devices change places."""
        rest = [k for k in range(len(self.send_s)) if k not in (one, other)]
        return all(
            (array[one, other], array[one, one]) == (array[other, one], array[other, other])
            and np.array_equal(array[one, rest], array[other, rest])
            and np.array_equal(array[rest, one], array[rest, other])
            for array in self.arrays()
        )


@dataclass(frozen=True)
class Problem:
    """Ops to be put on devices.

    Attributes:
        name: for messages.
        ops: names, in an order in which every value is made before it is read.
        devices: names.
        compute_s: seconds of each op on each device, shape (num_ops, num_devices); infinite where it may not run.
        nets: the values that may cross from device to device.
        order: pairs (a, b): in a contiguous solution, b is in the block of a or in a later one.
        op_bytes: bytes of weights that only this op reads, shape (num_ops,).
        memory_bytes: cap of each device, shape (num_devices,); infinite for no cap.
        weights: bytes read by several ops.
        pools: caps over several devices.
        groups: ops that stay in one block.
        send_once: a sender pays once for each value (the dearest of its destinations), not once for each destination.
        overlap: a device computes and transfers at the same time: its load is the larger of the two, not the sum.
        processors: number of the processor of each device, counted from 0, if devices share its time and its memory, which has
            one cap. Only the evaluator knows processors; planners take problems without them.
        wires: network cards and uplinks between hosts, and buses of devices; the name of a device says its host.
            ``planners.wired`` plans around them.
        reasons: why (op, device) is not allowed, in words, for messages.
        host_s: seconds of the host's work for each sample, which a device pays as part of sending to the host; for messages.
        pinned_s_per_byte: seconds in which a byte of streamed weights comes to each device; 0 where none may be streamed.
    """

    name: str
    ops: tuple[str, ...]
    devices: tuple[str, ...]
    compute_s: Floats
    nets: tuple[Net, ...]
    order: tuple[tuple[int, int], ...]
    transfers: Transfers
    op_bytes: Floats
    memory_bytes: Floats
    weights: tuple[SharedWeight, ...] = ()
    pools: tuple[Pool, ...] = ()
    groups: tuple[tuple[int, ...], ...] = ()
    send_once: bool = False
    overlap: bool = False
    processors: tuple[int, ...] = ()
    wires: Wires = NO_WIRES
    reasons: Mapping[tuple[int, int], str] = field(default_factory=dict)
    host_s: float = 0.0
    pinned_s_per_byte: tuple[float, ...] = ()

    @property
    def num_ops(self) -> int:
        """How many ops there are."""
        return len(self.ops)

    @property
    def num_devices(self) -> int:
        """How many devices there are, the host not counted."""
        return len(self.devices)

    @property
    def total_bytes(self) -> float:
        """Bytes of all weights, each once."""
        return float(self.op_bytes.sum()) + sum(weight.num_bytes for weight in self.weights)

    def with_streams(self, seconds: float) -> "Problem":
        """The problem whose caps are larger by the bytes of weights that come in so many seconds.

        A planner that knows no streams finds the blocks; a bound of this problem holds for all whose streams take that long. An
        op whose weights are larger than a cap has no place there.
        """
        rates = np.array(self.pinned_s_per_byte or np.zeros(self.num_devices))
        if not seconds or not rates.any():
            return self
        more = np.divide(seconds, rates, out=np.zeros(self.num_devices), where=rates > 0)
        large = (self.op_bytes[:, None] > self.memory_bytes) & (rates > 0)
        why = {
            (
                op,
                device,
            ): f"op '{self.ops[op]}': its weights alone take {bytes_text(int(self.op_bytes[op]))}, streamed or not, and "
            f"the cap of '{self.devices[device]}' is {bytes_text(int(self.memory_bytes[device]))}"
            for op, device in np.argwhere(large).tolist()
        }
        return replace(
            self,
            memory_bytes=self.memory_bytes + more,
            compute_s=np.where(large, np.inf, self.compute_s),
            reasons={**self.reasons, **why},
        )

    @cached_property
    def processor_of(self) -> NDArray[np.int64]:
        """The number of the processor of each device, shape (num_devices,)."""
        return np.array(self.processors or range(self.num_devices), dtype=np.int64)

    def summed(self, loads: Floats) -> Floats:
        """For each device the sum of the loads of all devices on its processor, shape (num_devices,)."""
        return np.bincount(self.processor_of, loads)[self.processor_of].astype(np.float64)

    def place(self, device: int) -> str:
        """The name of a device on the machine: devices of a problem may have the name of a backend behind it."""
        return self.devices[device].partition(" (")[0]

    @cached_property
    def index(self) -> dict[str, int]:
        """Op name to its position."""
        return {name: position for position, name in enumerate(self.ops)}

    @cached_property
    def device_classes(self) -> tuple[tuple[int, ...], ...]:
        """Devices that may change places without changing any cost, grouped; every device is in one group."""
        classes: list[list[int]] = []
        for device in range(self.num_devices):
            home = next((group for group in classes if self._interchangeable(group[0], device)), None)
            if home is None:
                classes.append([device])
            else:
                home.append(device)
        return tuple(map(tuple, classes))

    @cached_property
    def representatives(self) -> list[int]:
        """One device of each class."""
        return [members[0] for members in self.device_classes]

    @cached_property
    def edges(self) -> tuple[tuple[int, int], ...]:
        """(maker, reader) of every value that an op makes and an op reads, each pair once, sorted."""
        return edges_of(self.nets)

    @cached_property
    def readers(self) -> list[list[int]]:
        """For each op, the ops that read its values."""
        return rows_of(self.edges, self.num_ops)

    @cached_property
    def makers(self) -> list[list[int]]:
        """For each op, the ops whose values it reads."""
        return rows_of([(reader, maker) for maker, reader in self.edges], self.num_ops)

    def _interchangeable(self, one: int, other: int) -> bool:
        pools = {device: [pool for pool in self.pools if device in pool.devices] for device in (one, other)}
        return bool(
            self.memory_bytes[one] == self.memory_bytes[other]
            and pools[one] == pools[other]
            and self.transfers.alike(one, other)
            and np.array_equal(self.compute_s[:, one], self.compute_s[:, other])
            and self.wires.alike(self.place(one), self.place(other))
        )

    @cached_property
    def pins(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Every (net, reader) pair as two parallel arrays; a reader is an op or HOST."""
        nets = [number for number, net in enumerate(self.nets) for _ in net.consumers]
        readers = [reader for net in self.nets for reader in net.consumers]
        return np.array(nets, dtype=np.int64), np.array(readers, dtype=np.int64)

    @cached_property
    def net_bytes(self) -> Floats:
        """Bytes of each net, shape (num_nets,)."""
        return np.array([net.num_bytes for net in self.nets], dtype=np.float64)

    @cached_property
    def producers(self) -> NDArray[np.int64]:
        """Producer of each net (HOST for inputs), shape (num_nets,)."""
        return np.array([net.producer for net in self.nets], dtype=np.int64)

    def verify(self) -> "Problem":
        """Return the problem, or raise UsageError with every fault: shapes, signs, NaN, indices, values read before made."""
        num_ops, num_devices, faults = self.num_ops, self.num_devices, []
        if not num_ops:
            faults.append("it has no ops")
        if not num_devices:
            faults.append("it has no devices")
        shapes = [("compute_s", self.compute_s, (num_ops, num_devices)), ("op_bytes", self.op_bytes, (num_ops,))]
        shapes.append(("memory_bytes", self.memory_bytes, (num_devices,)))
        shapes += [("transfers", array, (num_devices + 1, num_devices + 1)) for array in self.transfers.arrays()]
        for name, array, shape in shapes:
            if array.shape != shape:
                faults.append(f"{name} has shape {array.shape}, and {shape} is needed")
            elif np.isnan(array).any() or (array < 0).any():
                faults.append(f"{name} holds NaN or a negative number; all must be 0 or more")
            elif name == "transfers" and np.isinf(array).any():
                faults.append("transfers holds infinity; all must be finite, so give a slow link many seconds")
        if len(set(self.ops)) < num_ops:
            faults.append("two ops have one name")
        if self.processors and (len(self.processors) != num_devices or not set(self.processors) <= set(range(num_devices))):
            faults.append(f"processors are {self.processors}; {num_devices} numbers from 0 to {num_devices - 1} are needed")
        faults += self._net_faults()
        for kind, members in [("group", group) for group in self.groups] + [("weight", w.users) for w in self.weights]:
            faults += [f"a {kind} names op number {op}, and there are {num_ops} ops" for op in members if not 0 <= op < num_ops]
        faults += [f"a weight has {w.num_bytes} bytes; 0 or more are needed" for w in self.weights if not w.num_bytes >= 0]
        outside = [d for pool in self.pools for d in pool.devices if not 0 <= d < num_devices]
        faults += [f"a pool names device number {d}, and there are {num_devices} devices" for d in outside]
        faults += [f"a pool has {pool.num_bytes} bytes; 0 or more are needed" for pool in self.pools if not pool.num_bytes >= 0]
        faults += [f"order names op numbers {pair}" for pair in self.order if not all(0 <= op < num_ops for op in pair)]
        raise_faults(UsageError, f"problem '{self.name}' does not verify", faults)
        return self

    def _net_faults(self) -> list[str]:
        faults = []
        for number, net in enumerate(self.nets):
            if not all(HOST <= op < self.num_ops for op in (net.producer, *net.consumers)):
                faults.append(f"net {number} names an op that does not exist: {net}")
            elif net.producer != HOST and any(reader != HOST and reader <= net.producer for reader in net.consumers):
                faults.append(
                    f"the value of op '{self.ops[net.producer]}' is read before it is made; sort the ops, break the cycle"
                )
            if not 0 <= net.num_bytes < np.inf:
                faults.append(f"net {number} has {net.num_bytes} bytes; 0 or more are needed, and finite")
        return faults


@dataclass(frozen=True, slots=True)
class Block:
    """Ops that run together, and the devices that run them; several devices are replicas and take turns.

    Each device holds at most ``resident_bytes`` of weights, and the others are streamed to it; infinite if all stay.
    """

    ops: tuple[int, ...]
    devices: tuple[int, ...]
    resident_bytes: float = np.inf
