"""A device of torch without hardware, ``simulated:N``: memory of its own with a cap, and a clock that counts work in its queues.

Its tensors hide CPU tensors. Torch calls ``compute`` for every op on them, which refuses what a real device refuses: an op that
also reads a tensor of the host or of another device, a read by the host outside a queue, and memory beyond the cap. Time is
simulated, never slept: each queue has a clock, an op takes ``OP_S``, and copies take turns on a link of ``BUS_BYTES_PER_S`` in
each direction, and on a bus that the devices of a process may share. The host takes no time.
Processes see what others hold by names of abstract sockets, which end with their process.
"""

import os
import re
import socket
import weakref
import zlib
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch.utils import _pytree
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

TOTAL_BYTES = 1 << 30
CONTEXT_BYTES = 32 << 20
OP_S, BUS_BYTES_PER_S = 1e-5, 1e10
PRODUCTS = ("linear", "addmm", "mm", "bmm", "convolution", "conv2d")
"""Ops that take half of ``OP_S`` in half precision and in TF32."""
TAG = f"simulated-{os.getuid()}-{zlib.crc32(__file__.encode())}-{os.environ.get('PYTEST_XDIST_WORKER', '')}"
"""Marks memory of this checkout and of this worker of the tests, which run beside others."""


@dataclass(eq=False)
class Queue:
    """The clock of a queue: the seconds at which its work so far is done."""

    time_s: float = 0.0


SLOT_S = 1e-6


def no_copies() -> tuple[deque[tuple[float, float]], ...]:
    return deque(maxlen=64), deque(maxlen=64)


@dataclass
class Bus:
    """What the copies of several devices share: in each microsecond it carries bytes of several copies, the first asked first.

    ``used`` has the bytes that pass it, and each link, by direction and microsecond.
    """

    bytes_per_s: float
    used: Counter[tuple[int | None, bool, int]] = field(default_factory=Counter)

    def end_s(self, begin_s: float, num_bytes: float, index: int, leaves: bool) -> float:
        """When a copy over the bus and the link of a device is done; what it takes is taken."""
        slot, ways = int(begin_s / SLOT_S), ((None, self.bytes_per_s), (index, BUS_BYTES_PER_S))
        while True:
            begin_s = max(begin_s, slot * SLOT_S)
            rest_s = (slot + 1) * SLOT_S - begin_s
            room = min(min(rate * rest_s, rate * SLOT_S - self.used[way, leaves, slot]) for way, rate in ways)
            taken = min(num_bytes, max(0.0, room))
            for way, _ in ways:
                self.used[way, leaves, slot] += taken
            num_bytes -= taken
            if num_bytes < 1:
                return begin_s + taken / min(rate for _, rate in ways)
            slot += 1


@dataclass
class Memory:
    """The memory of one device in this process.

    Attributes:
        index: number of the device.
        most_bytes: its size.
        held: address of an allocation to its bytes and the number of tensors that use it.
        running: the queue whose work is done now; None while the host does something else.
        copies: begin and end in seconds of the last copies to the device and from it.
        bus: what its copies pass beside its link; None for nothing.
        tf32: whether products round what they multiply to 10 bits of mantissa.
    """

    index: int
    most_bytes: int = TOTAL_BYTES
    held: dict[int, list[int]] = field(default_factory=dict)
    running: Queue | None = None
    copies: tuple[deque[tuple[float, float]], ...] = field(default_factory=no_copies)
    bus: Bus | None = None
    tf32: bool = False
    devices: ClassVar[dict[int, "Memory"]] = {}

    @property
    def free_bytes(self) -> int:
        """Bytes that neither this process nor another one holds."""
        return self.most_bytes - sum(size for size, _ in self.held.values()) - sum(_taken(self.index).values())

    def take(self, address: int, num_bytes: int) -> None:
        """Count one more tensor at an address. Raises: OutOfMemoryError: the device is full."""
        if address not in self.held and num_bytes > self.free_bytes:
            tried = f"Tried to allocate {num_bytes} bytes, {self.free_bytes} bytes are free"
            raise torch.OutOfMemoryError(f"simulated:{self.index} out of memory. {tried}")
        self.held.setdefault(address, [num_bytes, 0])[1] += 1

    @contextmanager
    def working(self, queue: Queue) -> Iterator[None]:
        """What is done here is work of the queue."""
        before, self.running = self.running, queue
        try:
            yield
        finally:
            self.running = before

    def release(self, address: int) -> None:
        """Count one tensor less."""
        self.held[address][1] -= 1
        if not self.held[address][1]:
            del self.held[address]

    def spend(self, num_copied_bytes: int | None, leaves: bool, is_fast: bool = False) -> None:
        """Let the running queue spend the time of an op, or of a copy, which takes the first gap between others on its link."""
        if self.running is None:
            return
        if num_copied_bytes is None:
            self.running.time_s += OP_S / 2 if is_fast else OP_S
            return
        begin_s, seconds = self.running.time_s, num_copied_bytes / BUS_BYTES_PER_S
        if self.bus is not None:
            self.running.time_s = self.bus.end_s(begin_s, num_copied_bytes, self.index, leaves)
            return
        for other_begin_s, other_end_s in sorted(self.copies[leaves]):
            if begin_s + seconds > other_begin_s:
                begin_s = max(begin_s, other_end_s)
        self.copies[leaves].append((begin_s, begin_s + seconds))
        self.running.time_s = begin_s + seconds


class Held(torch.Tensor):
    """A tensor in the memory of a device."""

    raw: torch.Tensor

    @staticmethod
    def __new__(cls, raw: torch.Tensor, index: int) -> "Held":
        """The tensor whose values lie in ``raw``."""
        layout = {"strides": raw.stride(), "storage_offset": raw.storage_offset(), "dtype": raw.dtype}
        made = torch.Tensor._make_wrapper_subclass(cls, raw.size(), **layout, device=f"simulated:{index}")
        made.raw, storage, memory = raw, raw.untyped_storage(), Memory.devices[index]
        memory.take(storage.data_ptr(), storage.nbytes())
        weakref.finalize(made, memory.release, storage.data_ptr()).atexit = False
        return made

    @classmethod
    def __torch_dispatch__(cls, op: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        """Torch's way to an op on such tensors."""
        return compute(op, *args, **(kwargs or {}))


def compute(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Do an op on the device. Raises: RuntimeError: a real device would refuse it."""
    tensors = [leaf for leaf in _pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    mine = [tensor for tensor in tensors if isinstance(tensor, Held)]
    is_copy = op in (torch.ops.aten.copy_.default, torch.ops.aten._to_copy.default)
    first = args[0] if args and isinstance(args[0], torch.Tensor) else next(iter(tensors), None)
    target = torch.device(kwargs["device"]) if kwargs.get("device") is not None else None if first is None else first.device
    indices = {tensor.device.index for tensor in mine} | ({target.index or 0} if target and target.type == "simulated" else set())
    if len(indices) != 1 or (not is_copy and any(tensor.dim() for tensor in tensors if not isinstance(tensor, Held))):
        raise RuntimeError(f"{op}: expected all tensors on the same device, found {sorted({str(t.device) for t in tensors})}")
    memory = Memory.devices[indices.pop()]
    leaves = target is not None and target.type == "cpu"
    if memory.running is None and mine and (leaves or not (is_copy or op.is_view)):
        raise RuntimeError(f"{op}: the host reads memory of simulated:{memory.index} outside a queue")
    is_product = op.overloadpacket.__name__ in PRODUCTS
    if not op.is_view:
        is_fast = is_product and (memory.tf32 or tensors[0].dtype in (torch.float16, torch.bfloat16))
        num_bytes = sum(t.nbytes for t in tensors[-1:]) if is_copy and len(mine) < 1 + (len(tensors) > 1) else None
        memory.spend(num_bytes, leaves, is_fast)
    own = {id(tensor.raw): tensor for tensor in mine}
    kwargs |= {"device": torch.device("cpu")} if "device" in kwargs else {}
    bare = _pytree.tree_map_only(Held, lambda held: held.raw, (args, kwargs))
    if is_product and memory.tf32:
        bare = _pytree.tree_map_only(torch.Tensor, _rounded, bare)
    with torch.inference_mode(torch.is_inference_mode_enabled() and not (op.is_view and not mine[0].is_inference())):
        made = op(*bare[0], **bare[1])
        if leaves:
            return args[0] if op is torch.ops.aten.copy_.default else made
        return _pytree.tree_map_only(torch.Tensor, lambda raw: own[id(raw)] if id(raw) in own else Held(raw, memory.index), made)


def _rounded(raw: torch.Tensor) -> torch.Tensor:
    """A float tensor rounded to 10 bits of mantissa; another tensor as it is."""
    if raw.dtype != torch.float32:
        return raw
    return ((raw.contiguous().view(torch.int32) + (1 << 12)) & -(1 << 13)).view(torch.float32)


@cache
def install() -> torch.library.Library:
    """Make ``simulated:N`` devices of torch in this process."""
    _setup_privateuseone_for_python_backend("simulated")
    library = torch.library.Library("_", "IMPL")
    library.fallback(compute, "PrivateUse1")
    return library


@cache
def memory_of(index: int) -> Memory:
    """The memory of a device, opened in this process: from now on its context is taken."""
    install()
    Memory.devices[index] = Memory(index)
    weakref.finalize(Memory.devices[index], _claim(index, CONTEXT_BYTES).close)
    return Memory.devices[index]


@contextmanager
def taken(index: int, num_bytes: int) -> Iterator[None]:
    """Another program holds memory of a device."""
    with closing(_claim(index, num_bytes)):
        yield


def _claim(index: int, num_bytes: int) -> socket.socket:
    """A socket whose name tells all processes that so many bytes of a device are taken, until it is closed."""
    claim = socket.socket(socket.AF_UNIX)
    claim.bind(f"\0{TAG}-{index}-{num_bytes}-{os.urandom(8).hex()}")
    return claim


def _taken(index: int) -> Counter[str]:
    """Bytes of a device that processes have claimed, by name."""
    found = re.findall(rf"@({TAG}-{index}-(\d+)-\w+)", Path("/proc/net/unix").read_text(encoding="utf-8"))
    return Counter({name: int(size) for name, size in found})
