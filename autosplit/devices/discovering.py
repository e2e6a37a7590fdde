"""The devices of this machine: cores within affinity and container quota, CUDA devices, memory, caches, backends installed."""

import math
import platform
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, get_args

from autosplit import tables
from autosplit.arguments import checked
from autosplit.devices.accelerators import PROVIDERS, Facts, absence, accelerator_kinds, is_accelerator, open_all, provider
from autosplit.devices.calls import begin
from autosplit.devices.limits import affinity, cpu_quota, memory_limit_bytes, read_words, usable_cores
from autosplit.devices.processes import Worker, spawn_worker
from autosplit.errors import DeviceError, UsageError, each, names, raise_faults
from autosplit.values.machine import HOST_KINDS, Kind, Machine, parse_bytes, parse_device, span
from autosplit.values.machinefile import read_machine
from autosplit.values.samples import backends
from autosplit.versions import version_of

FACTS_LIMIT_S = 120.0
LEAST_WORKER_BYTES = 1_000_000
"""Bytes that each worker on cores takes for itself; measured ones take 20 times as many."""

CPUS = Path("/sys/devices/system/cpu")

PACKAGES: Mapping[str, tuple[str, ...]] = {
    "eager": ("torch",),
    "onnxruntime": ("onnxruntime", "onnx", "onnxscript"),
    "openvino": ("openvino",),
    "inductor": ("torch",),
}
"""Name of each own backend to the packages whose versions change its speed, the runtime itself first."""


@dataclass(frozen=True)
class Description:
    """This machine as ``autosplit devices`` shows it: facts, and one row for each device and backend."""

    facts: Mapping[str, Any]
    devices: tuple[Mapping[str, Any], ...]
    backends: tuple[Mapping[str, Any], ...]
    num_bytes: Mapping[str, Any]
    """The sizes among the facts as numbers."""

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON: sizes in bytes, in place of their texts."""
        texts = {key: value for key, value in self.facts.items() if f"{key}_bytes" not in self.num_bytes}
        rows = {"devices": [*map(dict, self.devices)], "backends": [*map(dict, self.backends)]}
        return {"machine": {**texts, **self.num_bytes}, **rows}

    def frame(self) -> Any:
        """The devices as a pandas DataFrame indexed by name."""
        return tables.frame(self.devices, index="device")

    def _repr_html_(self) -> str:
        facts = ", ".join(f"{key.replace('_', ' ')}: {value}" for key, value in self.facts.items())
        return tables.html(self.devices, facts) + tables.html(self.backends, "backends")


def discover() -> Machine:
    """This machine with its default devices: each usable CPU core alone, then each accelerator.

    The usable cores are those of the process's affinity, up to the container's CPU quota. Each accelerator reserves one core for
    the worker that feeds it, as long as a core is left.
    """
    cores, kinds = usable_cores(), accelerator_kinds()
    others = [parse_device(f"{kind}:{index}") for kind in kinds for index in range(provider(kind).count())]
    needed = max(0, len(others) - (len(affinity()) - len(cores)))
    cpus = [parse_device(f"cpu:{core}") for core in cores[: max(1, len(cores) - needed)]]
    return with_own_memory(with_feeding_cores(Machine.of([*cpus, *others])))


Devices = Machine | str | Sequence[str]
"""A machine, or the names of its devices: a list, or one text with commas between."""


@checked
def machine_for(
    devices: str | Sequence[str] | None = None,
    machine_file: str | Path | None = None,
    memory: str | Mapping[str, str | int] | None = None,
    *,
    here: bool = True,
) -> Machine:
    """The machine that the user named, checked against this one.

    Args:
        devices: names with commas between, such as ``cpu:0,cpu:1`` or ``cpu:0-1,cuda:0``, or a list of names; ``cpu`` stands for
            each usable core, ``cuda`` for each CUDA device, and so on; all devices by default.
        machine_file: a YAML file with devices, memory caps and links; not together with ``devices``.
        memory: caps, either one size for every device (``300MB``), sizes by device (``cpu:0=300MB,cpu:1=1GiB``), or a mapping.
        here: whether the devices are needed; without, a plan may be made for devices that this machine lacks.
    Raises:
        DeviceError: a core or an accelerator that this machine lacks, more cores than the quota, or a cap below the context.
        UsageError: both a list and a file, or a size that cannot be parsed.
    """
    if devices is not None and machine_file is not None:
        raise UsageError("devices are given twice, by --devices and by a machine file; leave one of them out")
    if machine_file is not None:
        machine = read_machine(Path(machine_file))
    elif devices is not None:
        machine = Machine.of(each("the devices are not understood", parse_device, _spelled_out(names("devices", devices))))
    else:
        machine = discover()
    if here:
        check_here(machine)
    machine = with_own_memory(with_feeding_cores(machine))
    machine = machine.with_memory(parse_memory(memory, machine)) if memory is not None else machine
    raise_faults(DeviceError, "memory caps do not fit the machine", [*_caps_below_context(machine)])
    return machine


def _caps_below_context(machine: Machine) -> Iterator[str]:
    """A sentence for each cap that a worker breaks before it has loaded anything."""
    for device in machine.devices:
        least_bytes = LEAST_WORKER_BYTES if device.kind == "cpu" else device.context_bytes
        if device.memory_bytes is not None and device.memory_bytes <= least_bytes:
            cap, least = tables.bytes_text(device.memory_bytes), tables.bytes_text(least_bytes)
            what = "each worker alone takes more than" if device.kind == "cpu" else "drivers and libraries of each worker take"
            yield f"the cap of '{device.name}' is {cap}, and {what} {least} there; raise it, or leave the device out"


def _spelled_out(given: Sequence[str]) -> Iterator[str]:
    """The names, with those of all devices of a kind in place of the kind alone, or the first one where none is here."""
    for name in given:
        is_kind = name in get_args(Kind)
        found = [device.name for device in discover().devices if device.kind == name] if is_kind else []
        yield from found or [f"{name}:0" if is_kind else name]


def as_machine(devices: Devices | None, here: bool = True) -> Machine:
    """A machine given as a value or by device names; ``here`` and errors as for ``machine_for``."""
    return devices if isinstance(devices, Machine) else machine_for(devices, here=here)


def parse_memory(memory: str | Mapping[str, str | int], machine: Machine) -> dict[str, int]:
    """Device name to cap in bytes. Raises: UsageError: not a size, or a device named twice.

    >>> parse_memory("cpu:0=1KiB", Machine.of([parse_device("cpu:0"), parse_device("cpu:1")]))
    {'cpu:0': 1024}
    """
    if isinstance(memory, Mapping):
        return {name: parse_bytes(size) for name, size in memory.items()}
    if "=" not in memory:
        return dict.fromkeys((device.name for device in machine.devices), parse_bytes(memory))
    seen: set[str] = set()

    def cap(entry: str) -> tuple[str, int]:
        name, equals, size = entry.partition("=")
        if not equals or name.strip() in seen:
            raise UsageError(f"memory '{memory}' is not understood at '{entry}'; write 300MB, or cpu:0=300MB,cpu:1=1GiB")
        seen.add(name.strip())
        return name.strip(), parse_bytes(size)

    return dict(each("these memory caps are not understood", cap, memory.split(",")))


def check_here(machine: Machine) -> None:
    """Raise DeviceError, with every fault, unless this machine has the devices.

    Null devices are everywhere. The hosts of a cluster were asked for theirs.
    """
    machine = replace(machine, devices=tuple(device for device in machine.devices if not device.host))
    faults = list(absent_devices(machine).values())
    num_cores = len({(device.host, core) for device in machine.devices if device.kind == "cpu" for core in device.cores})
    quota = cpu_quota()
    if quota is not None and not faults and num_cores > max(1, math.floor(quota)):
        faults.append(
            f"the devices hold {num_cores} cores, and the CPU quota of this container pays for {quota:g}; "
            f"name at most {max(1, math.floor(quota))}"
        )
    raise_faults(DeviceError, "the devices do not fit this machine", faults)


def absent_devices(machine: Machine) -> dict[str, str]:
    """The devices that this machine lacks, by name, with the reason."""
    available, found = affinity(), {}
    for device in machine.devices:
        lost = sorted(set(device.cores) - set(available)) if device.kind == "cpu" else []
        if lost:
            cores = ", ".join(map(str, lost))
            found[device.name] = f"device '{device.name}' names core {cores}, and this process may use cores {span(available)}"
        elif is_accelerator(device) and (fault := absence(device.name)):
            found[device.name] = fault
        elif device.kind not in HOST_KINDS and not is_accelerator(device):
            found[device.name] = f"device '{device.name}' is not here: no package serves {device.kind} devices (docs/backends.md)"
    return found


def with_feeding_cores(machine: Machine) -> Machine:
    """The machine with a CPU core for the worker of each accelerator, which queues work and copies.

    It is the first core of the affinity that no device uses. If none is left, the worker shares the last usable core.
    """
    taken = {core for device in machine.devices for core in device.cores}
    spare = [core for core in affinity() if core not in taken]
    devices = []
    for device in machine.devices:
        if is_accelerator(device) and not device.cores:
            device = replace(device, cores=(spare.pop(0) if spare else usable_cores()[-1],))
        devices.append(device)
    return replace(machine, devices=tuple(devices))


def with_own_memory(machine: Machine) -> Machine:
    """The machine with the free memory of each accelerator as its cap, unless it has one, and with its context."""
    found = facts_of(tuple(device.name for device in machine.devices if is_accelerator(device) and not absence(device.name)))
    caps = {name: facts.free_bytes for name, facts in found.items() if machine[name].memory_bytes is None}
    there = (replace(d, context_bytes=found[d.name].context_bytes) if d.name in found else d for d in machine.devices)
    return replace(machine, devices=tuple(there)).with_memory(caps)


def facts_of(names: tuple[str, ...]) -> Mapping[str, Facts]:
    """The facts of these accelerators, with the memory that is free while no process of ours has opened them.

    Two processes open them one after the other and end, since an open device takes memory. The context is the memory that the
    first one sees the second one take.

    Raises: DeviceError: one cannot be opened.
    """
    kinds = dict.fromkeys(name.partition(":")[0] for name in names)
    return _facts_of(names, tuple(provider(kind).remark() for kind in kinds)) if names else {}


@cache
def _facts_of(names: tuple[str, ...], _remarks: tuple[str, ...]) -> Mapping[str, Facts]:
    """``facts_of``, asked once for each numbering of the devices."""

    def opened(worker: Worker) -> dict[str, Facts]:
        return begin(worker, "during the inspection of devices", open_all, names, dict(PROVIDERS)).result(FACTS_LIMIT_S)

    target, name = "autosplit.devices.calls:serve", f"inspecting {', '.join(names)}"
    with closing(spawn_worker(target, name=name)) as first, closing(spawn_worker(target, name=name)) as second:
        alone, _, beside = opened(first), opened(second), opened(first)
    context_bytes = {name: max(0, facts.free_bytes - beside[name].free_bytes) for name, facts in alone.items()}
    return {
        name: replace(facts, free_bytes=facts.free_bytes + context_bytes[name], context_bytes=context_bytes[name])
        for name, facts in alone.items()
    }


def cpu_name() -> str:
    """The processor's model name."""
    path = Path("/proc/cpuinfo")
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []:
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def caches(core: int = 0, cpus: Path = CPUS) -> dict[str, int]:
    """Cache level to bytes as one core sees it, without instruction caches: ``{"L1": 32768, "L2": 1048576}``."""
    found = {}
    for folder in sorted((cpus / f"cpu{core}" / "cache").glob("index*")):
        kind, level, size = (read_words(folder / name) for name in ("type", "level", "size"))
        if kind and level and size and kind[0] != "Instruction":
            found[f"L{level[0]}"] = parse_bytes(size[0].replace("K", "Ki").replace("M", "Mi"))
    return found


def packages_of(backend: str) -> tuple[str, ...]:
    """The packages whose versions change the speed of a backend, the runtime first; of another package's backend its own."""
    return PACKAGES.get(backend) or (backends()[backend].partition(":")[0].partition(".")[0],)


def versions(backends: Sequence[str] = ()) -> dict[str, str]:
    """Package name to installed version, for torch and the packages of the named backends. Imports nothing."""
    names = dict.fromkeys(["torch", *(package for backend in backends for package in packages_of(backend))])
    return {name: version for name in names if (version := version_of(name))}


def describe(backends: Sequence[Mapping[str, Any]] = ()) -> Description:
    """This machine as ``autosplit devices`` shows it, with these rows of backends (``states`` in ``backends.base``)."""
    quota, own, memory_bytes = cpu_quota(), caches(affinity()[0]), memory_limit_bytes()
    facts = {
        "cpu": cpu_name(),
        "cores": span(affinity()),
        "cpu_quota": "none" if quota is None else f"{quota:g} cores",
        "memory": tables.bytes_text(memory_bytes),
        "caches": ", ".join(f"{level} {tables.bytes_text(size)}" for level, size in own.items()) or "not known",
        "python": platform.python_version(),
    }
    rows = []
    machine = discover()
    accelerators = facts_of(tuple(device.name for device in machine.devices if is_accelerator(device)))
    for device in machine.devices:
        what, memory = facts["cpu"], "the machine's"
        if there := accelerators.get(device.name):
            what, memory = str(there), f"{tables.bytes_text(there.free_bytes)} free"
        rows.append(
            {"device": device.name, "kind": device.kind, "what": what, "cores": span(device.cores) or "-", "memory": memory}
        )
    return Description(facts, tuple(rows), tuple(backends), {"memory_bytes": memory_bytes, "caches_bytes": dict(own)})
