"""Machine: the devices a model may run on, and the links between them.

The name of a device says its kind and number: ``cpu:0`` (a core), ``cpu:0-3`` or ``cpu:0+2`` (core sets), ``cuda:0``, ``xpu:0``,
``mps:0``, ``npu:0`` (any other accelerator), or ``null:0`` (no hardware, for tests and simulations). A cluster of hosts is a
machine too: there the name of the host stands before the name of the device, for example ``node-a/cpu:0``.

Core sets may overlap: ``cpu:0-1`` is an alternative to ``cpu:0`` and ``cpu:1``. Two devices of one plan have no core in common.
The largest sets of devices that one plan can use are the ``layouts`` of a machine.
"""

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations, islice, product
from typing import Any, Literal, get_args

from autosplit import tables
from autosplit.arguments import checked
from autosplit.errors import DeviceError, UsageError, each, listed, raise_faults
from autosplit.parsing import shown
from autosplit.values.links import Link, Wire, shared_memory_link

Kind = Literal["cpu", "cuda", "xpu", "mps", "npu", "null"]
HOST = "host"
"""The name of the host in links: it feeds every pipeline and takes its results."""

MAX_CORES = 2048
"""Most cores of one device."""
MAX_DEVICES = 1024

MAX_LAYOUTS = 16
"""Most ways to choose devices without a core in common; the planner is asked once for each."""

MAX_ON_CORE = 16
"""Most devices of a machine that may hold one core, and most replicas of a module on one device."""

HOST_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}"
"""Pattern of the name of a host in a cluster."""

_NUMBER = "(?:0|[1-9][0-9]{0,3})"
"""Pattern of a device number: decimal, no leading zero, at most four digits."""


@dataclass(frozen=True, slots=True)
class Speed:
    """The stated speed of a device that is not measured.

    It is ``times`` times as fast as the device ``of``; or does ``flops`` operations and moves ``bytes_per_s``; or ``op_s`` has
    the seconds of ops by pattern, where the last pattern that matches an op counts.
    """

    times: float = 0.0
    of: str = ""
    flops: float = 0.0
    bytes_per_s: float = 0.0
    op_s: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Device:
    """A device that runs stages.

    Attributes:
        name: ``cpu:0-1``, ``cuda:0`` or ``null:0``, in a cluster with the host before it: ``node-a/cpu:0-1``.
        kind: the part of the name before the colon, without the host.
        cores: the CPU cores that its worker is pinned to; empty for ``null``. For a CUDA device, the core that feeds it, which
            discovery chooses (``discovering.with_feeding_cores``).
        index: the ordinal of a CUDA or null device, 0 for a core set.
        memory_bytes: most bytes that its stages may hold together, or None for no limit.
        context_bytes: bytes of an accelerator's memory that each worker takes there for drivers and libraries, as measured.
        operators: patterns of the ops that it supports; empty for all ops.
        backends: the backends that may run on it, the preferred one first; empty for all backends.
        dtypes: dtypes of the values and weights that its ops may use, as torch names them; empty for all dtypes.
        max_subgraphs: most connected parts of a model that it takes, or None for no limit.
        min_ops: least number of ops of a connected part.
        shares: name of the device whose memory it uses, or empty if it has its own. No copy is needed between the two.
        one_model: whether it runs one model at a time.
        host: the host of a cluster that has it; empty for a device of this machine.
        speed: its speed, where it is stated and not measured.
    """

    name: str
    kind: Kind
    cores: tuple[int, ...] = ()
    index: int = 0
    memory_bytes: int | None = None
    context_bytes: int = 0
    operators: tuple[str, ...] = ()
    backends: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = ()
    max_subgraphs: int | None = None
    min_ops: int = 1
    shares: str = ""
    one_model: bool = False
    host: str = ""
    speed: Speed | None = None

    @property
    def memory(self) -> str:
        """The name of the device in whose memory its values are."""
        return self.shares or self.name

    def on_host(self, host: str) -> "Device":
        """The device as a cluster names it, or with ``''`` as its own host names it.

        >>> parse_device("cpu:0").on_host("node-a").name, parse_device("node-a/cpu:0").on_host("").name
        ('node-a/cpu:0', 'cpu:0')
        """
        name, shares = (one.removeprefix(f"{self.host}/") for one in (self.name, self.shares))
        before = f"{host}/" if host else ""
        return replace(self, name=before + name, shares=shares and before + shares, host=host)


@checked
@dataclass(frozen=True)
class Machine(tables.Tabular):
    """The devices in the order of the user, and the links of ordered pairs; other pairs have the assumed link.

    Values between two hosts also occupy the ``wires`` between them, and those of devices with a bus that bus.
    """

    INDEX = "device"
    devices: tuple[Device, ...]
    links: Mapping[tuple[str, str], Link]
    wires: tuple[Wire, ...] = ()

    @staticmethod
    def of(devices: Iterable[Device], links: Iterable[Link] = (), wires: Iterable[Wire] = ()) -> "Machine":
        """A verified machine. Raises: DeviceError: no devices, a name twice, or core sets that overlap in too many ways."""
        made = listed("devices", devices, Device, "; parse_device makes one of a name")
        return Machine(made, {(link.source, link.target): link for link in links}, tuple(wires)).verify()

    def __getitem__(self, name: str) -> Device:
        for device in self.devices:
            if device.name == name:
                return device
        known = ", ".join(device.name for device in self.devices)
        raise DeviceError(f"device '{name}' is not one of this machine's devices: {known}")

    def only(self, names: Iterable[str]) -> "Machine":
        """The machine with these devices alone. Raises: DeviceError: one of them is not a device of this machine."""
        return replace(self, devices=tuple(each("the devices are not of this machine", self.__getitem__, names))).verify()

    def without(self, name: str) -> "Machine":
        """The machine without a device that is lost. Raises: DeviceError: it is the only one, or not a device of this machine."""
        others = [device.name for device in self.devices if device is not self[name]]
        if not others:
            raise DeviceError(f"'{name}' is the only device; name others too")
        return self.only(others)

    def link(self, source: str, target: str) -> Link:
        """The link from ``source`` to ``target`` (device names, or ``host``).

        Two devices without a link of their own use the link of their hosts.
        """
        own = self.links.get((source, target))
        if own is None and (source != HOST or target != HOST):
            hosts = host_of(source), host_of(target)
            own = self.links.get(hosts) if hosts[0] != hosts[1] else None
        return own or shared_memory_link(source, target)

    def with_links(self, links: Iterable[Link]) -> "Machine":
        """The machine with these measured links in place of older links of the same pairs."""
        return replace(self, links={**self.links, **{(link.source, link.target): link for link in links}})

    def with_measured(self, links: Iterable[Link]) -> "Machine":
        """The machine with these measured links for pairs without a link."""
        return replace(self, links={**{(link.source, link.target): link for link in links}, **self.links})

    def with_memory(self, caps: Mapping[str, int]) -> "Machine":
        """The machine with these memory caps (device name to bytes). Raises: DeviceError: unknown name, cap below 1."""
        each("memory caps do not fit the machine", self.__getitem__, caps)
        devices = tuple(replace(d, memory_bytes=caps.get(d.name, d.memory_bytes)) for d in self.devices)
        return replace(self, devices=devices).verify()

    def verify(self) -> "Machine":
        """Return the machine, or raise DeviceError with every fault."""
        faults = [] if self.devices else ["it has no devices; name one, such as cpu:0"]
        faults += [
            f"the cap of '{device.name}' must be at least 1 byte, but is {device.memory_bytes}"
            for device in self.devices
            if device.memory_bytes is not None and device.memory_bytes < 1
        ]
        memories = {device.name for device in self.devices if not device.shares}
        faults += [
            f"device '{device.name}' shares the memory of '{device.shares}', which is not a device with memory of its own here"
            for device in self.devices
            if device.shares and device.shares not in memories
        ]
        names = Counter(device.name for device in self.devices)
        faults += [f"device '{name}' is given twice" for name, count in names.items() if count > 1]
        raise_faults(DeviceError, "the machine does not verify", faults)
        if len(self.layouts) > MAX_LAYOUTS:
            raise DeviceError(
                f"the core sets of the machine overlap in more than {MAX_LAYOUTS} ways; name fewer that have cores in common"
            )
        return self

    @cached_property
    def layouts(self) -> "tuple[Machine, ...]":
        """The machine with each largest set of devices without a core in common, the one with most devices first.

        Each plan uses the devices of one layout. Raises: DeviceError: too many devices have a core in common.
        """
        rivals: dict[str, set[str]] = {}
        for one, other, _ in _shared_cores(self.devices):
            rivals.setdefault(one, set()).add(other)
            rivals.setdefault(other, set()).add(one)
        if not rivals:
            return (self,)
        groups: list[set[str]] = []
        for name, others in rivals.items():
            joined = {name, *others}.union(*(group for group in groups if group & {name, *others}))
            groups = [*(group for group in groups if not group & joined), joined]
        choices = [_largest_free_sets(group, rivals) for group in groups]
        kept = [frozenset(rivals) - frozenset().union(*chosen) for chosen in islice(product(*choices), MAX_LAYOUTS + 1)]
        machines = [replace(self, devices=tuple(d for d in self.devices if d.name not in left)) for left in kept]
        return tuple(sorted(machines, key=lambda machine: -len(machine.devices)))

    def around(self, names: Collection[str]) -> "Machine":
        """The first layout that has these devices; the machine itself if none has all of them."""
        wanted = set(names)
        return next((layout for layout in self.layouts if wanted <= {device.name for device in layout.devices}), self)

    def rows(self) -> list[dict[str, Any]]:
        """One row a device."""
        return [
            {
                "device": device.name,
                "kind": device.kind,
                "cores": ",".join(map(str, device.cores)) or "-",
                "memory": tables.bytes_text(device.memory_bytes) if device.memory_bytes else "no cap",
            }
            for device in self.devices
        ]

    def _repr_html_(self) -> str:
        return tables.html(self.rows(), f"{len(self.devices)} devices")


def _shared_cores(devices: Iterable[Device]) -> list[tuple[str, str, list[int]]]:
    """Each pair of CPU devices that have cores in common, with these cores.

    Raises: DeviceError: a core is in too many devices.
    """
    holders: dict[tuple[str, int], list[str]] = {}
    for device in devices:
        for core in device.cores if device.kind == "cpu" else ():
            held = holders.setdefault((device.host, core), [])
            held.append(device.name)
            if len(held) > MAX_ON_CORE:
                raise DeviceError(
                    f"the machine does not verify: more than {MAX_ON_CORE} devices overlap on core {core}, such as "
                    f"'{held[0]}' and '{held[1]}'; name fewer core sets"
                )
    shared: dict[tuple[str, str], list[int]] = {}
    for (_, core), held in holders.items():
        for pair in combinations(dict.fromkeys(held), 2):
            shared.setdefault(pair, []).append(core)
    return [(one, other, cores) for (one, other), cores in shared.items()]


def overlaps(devices: Iterable[Device]) -> list[str]:
    """A sentence for each pair of CPU devices that have cores in common."""
    return [f"devices '{one}' and '{other}' overlap on core {span(cores, ', ')}" for one, other, cores in _shared_cores(devices)]


def _largest_free_sets(names: Collection[str], rivals: Mapping[str, Collection[str]]) -> list[frozenset[str]]:
    """The sets of names that hold no two rivals and that no further name can join; at most ``MAX_LAYOUTS + 1`` of them.

    For any name that is left, such a set holds the name or one of its rivals. The search tries each of these.
    """
    found, seen = set[frozenset[str]](), set[tuple[frozenset[str], frozenset[str]]]()
    waiting = [(frozenset[str](), frozenset(names))]
    while waiting and len(found) <= MAX_LAYOUTS:
        chosen, left = waiting.pop()
        free = {name for name in left if left.isdisjoint(rivals[name])}
        state = chosen, left = chosen | free, left - free
        if not left:
            found.add(chosen)
        elif state not in seen:
            seen.add(state)
            first = min(left)
            waiting += [(chosen | {name}, left - {name} - set(rivals[name])) for name in {first, *rivals[first]} & left]
    return sorted(found, key=sorted)


def parse_device(name: str) -> Device:
    """The device of a name, whether or not this machine has it.

    Raises: DeviceError: the name is none of ``cpu:A``, ``cpu:A-B``, ``cpu:A-B+C``, ``cuda:N``, ``xpu:N``, ``mps:N``, ``npu:N``
        or ``null:N``; or it has too many cores.

    >>> parse_device("cpu:0-2").cores, parse_device("cpu:0+2-3").cores, parse_device("node-a/cpu:1").host
    ((0, 1, 2), (0, 2, 3), 'node-a')
    """
    name = name.strip()
    host, slash, rest = name.rpartition("/")
    if slash and re.fullmatch(HOST_NAME, host):
        return parse_device(rest).on_host(host)
    for kind in get_args(Kind)[1:]:
        if match := re.fullmatch(rf"{kind}:({_NUMBER})", name):
            return Device(name, kind, index=int(match[1]))
    one = f"{_NUMBER}(-{_NUMBER})?"
    if not re.fullmatch(rf"cpu:{one}(\+{one})*", name):
        raise DeviceError(
            f"device {shown(name)} is not understood; write cpu:0 (a core), cpu:0-3 (a core set), cuda:0, xpu:0, mps:0, npu:0 or "
            "null:0"
        )
    cores: list[int] = []
    for part in name[4:].split("+"):
        first, last = int(part.split("-")[0]), int(part.split("-")[-1])
        if last < first:
            raise DeviceError(f"device {shown(name)} counts down; write {last}-{first} in place of {part}")
        cores += range(first, last + 1)
        if len(cores) > MAX_CORES:
            raise DeviceError(f"device {shown(name)} names more than {MAX_CORES} cores")
    if len(set(cores)) < len(cores):
        raise DeviceError(f"device {shown(name)} names a core twice")
    return Device(name, "cpu", cores=tuple(cores))


def union(devices: Iterable[Device]) -> Device:
    """One CPU device with the cores of all ``devices``, which are on one host, for a single process on the whole host.

    Its memory cap is the smallest cap of the devices.

    >>> union([parse_device("cpu:0"), parse_device("cpu:1-2"), parse_device("cpu:5")]).name
    'cpu:0-2+5'
    """
    devices = list(devices)
    cores = sorted(core for device in devices for core in device.cores)
    name = f"cpu:{span(cores, '+')}"
    caps = [device.memory_bytes for device in devices if device.memory_bytes is not None]
    whole = Device(name, "cpu", cores=tuple(cores), memory_bytes=min(caps, default=None))
    return whole.on_host(devices[0].host)


def places(device: str) -> tuple[str, ...]:
    """The names of the cores of a device, or its own name if it has none; two devices overlap if they have one in common.

    >>> places("cpu:0-1"), places("node-a/cpu:2"), places("cuda:0")
    (('cpu:0', 'cpu:1'), ('node-a/cpu:2',), ('cuda:0',))
    """
    found = parse_device(device)
    before = f"{found.host}/" if found.host else ""
    return tuple(f"{before}cpu:{core}" for core in found.cores) or (device,)


HOST_KINDS = ("cpu", "null")
"""Kinds of devices that compute in the memory of their host."""


def kind_of(name: str) -> str:
    """The kind of a device by its name.

    >>> kind_of("node-a/cuda:0"), kind_of("cpu:0-3")
    ('cuda', 'cpu')
    """
    return name.rpartition("/")[2].partition(":")[0]


def host_of(name: str) -> str:
    """The host of a device by its name: ``host`` (this machine) unless the name says another one.

    >>> host_of("node-a/cpu:0"), host_of("cpu:0"), host_of("host")
    ('node-a', 'host', 'host')
    """
    return name.rpartition("/")[0] or HOST


def span(cores: Collection[int], between: str = ",") -> str:
    """Core numbers as ranges.

    >>> span([0, 1, 2, 5])
    '0-2,5'
    """
    known = set(cores)
    starts = [core for core in sorted(known) if core - 1 not in known]
    ends = [core for core in sorted(known) if core + 1 not in known]
    return between.join(f"{a}-{b}" if a < b else f"{a}" for a, b in zip(starts, ends, strict=True))


def parse_bytes(text: str | int) -> int:
    """Bytes from ``300MB``, ``1.5GiB``, ``4096``. Raises: UsageError: not a size.

    >>> parse_bytes("300MB"), parse_bytes("1KiB"), parse_bytes(512)
    (300000000, 1024, 512)
    """
    match = re.fullmatch(r"\s*(\d{1,18}(?:\.\d{1,18})?)\s*((?:[KMGT]i?)?)B?\s*", str(text), re.IGNORECASE)
    if not match:
        raise UsageError(f"memory {shown(text)} is not a size; write 300MB, 1.5GiB or a number of bytes")
    unit = match[2].lower()
    base = 1024 if unit.endswith("i") else 1000
    return int(float(match[1]) * base ** " kmgt".index(unit[0] if unit else " "))
